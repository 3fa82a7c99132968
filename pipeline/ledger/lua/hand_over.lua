-- ARGV: id, worker, attempt, queue, tail (what the next worker needs to find the tail block).
-- Returns the request's priority, or -1 if this attempt is stale.
local id = ARGV[1]
local key = request_key(id)
local r = redis.call('HMGET', key, 'owner', 'attempt', 'priority')
if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] then return -1 end
redis.call('SREM', 'running:' .. ARGV[2], id)
redis.call('HSET', key, 'tail', ARGV[5])
enqueue(id, ARGV[4], now_ms())
return tonumber(r[3])
