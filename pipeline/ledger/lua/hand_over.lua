-- ARGV: id, worker, attempt, queue, tail (what the next worker needs to find the tail block).
-- Returns the messages to send, (id, queue, lane, ...), or false if this attempt is stale or has ended.
local id = ARGV[1]
local key = request_key(id)
local r = redis.call('HMGET', key, 'owner', 'attempt', 'owed', 'state')
if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] or r[4] ~= 'running' then return false end
if r[3] then settle(id, r[3]) end
redis.call('SREM', 'running:' .. ARGV[2], id)
redis.call('HSET', key, 'tail', ARGV[5])
local out, now = {}, now_ms()
redis.call('HSETNX', key, 'handed_ms', now)
enqueue(id, ARGV[4], now, out)
release_all(model_of(ARGV[4]), out)
return out
