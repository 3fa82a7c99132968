-- ARGV: id, queue, queue deadline ms, total deadline ms, max waiting, expiry s, then field, value ...
-- Returns {'ok', waiting} | {'exists'} | {'full', waiting}.
local id, queue = ARGV[1], ARGV[2]
local key = request_key(id)
if redis.call('EXISTS', key) == 1 then return {'exists', 0} end
local waiting = redis.call('ZCARD', 'waiting:' .. queue)
if waiting >= tonumber(ARGV[5]) then return {'full', waiting} end
local now = now_ms()
redis.call('HSET', key, 'attempt', 1, 'losses', 0, 'created_ms', now,
  'queue_deadline_ms', ARGV[3], 'deadline_ms', now + tonumber(ARGV[4]))
for i = 7, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', key, ARGV[6])
enqueue(id, queue, now)
redis.call('HINCRBY', 'counters', 'submitted', 1)
return {'ok', waiting}
