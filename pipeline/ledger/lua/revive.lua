-- Queues a dead letter again, with the tokens that it had and the attempts of a new request.
-- ARGV: id, queue, expiry s. Returns the messages to send, (id, queue, lane, ...), or false.
local id = ARGV[1]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'prompt', 'created_ms', 'deadline_ms', 'tenant')
if r[1] ~= 'failed' or not r[2] then return false end
redis.call('LREM', 'dead_letters', 0, id)
local now = now_ms()
local deadline = now + tonumber(r[4]) - tonumber(r[3])
redis.call('HINCRBY', key, 'attempt', 1)
redis.call('HSET', key, 'losses', 0, 'created_ms', now, 'deadline_ms', deadline)
redis.call('HDEL', key, 'ending', 'ended_ms', 'crashed', 'cancel', 'tail', 'trial', 'seen_bytes', 'seen_ms',
  'rests_until')
redis.call('EXPIRE', key, ARGV[3])
redis.call('EXPIRE', tokens_key(id), ARGV[3])
redis.call('ZADD', 'open:tenant:' .. r[5], deadline, id)
redis.call('ZADD', open_key(model_of(ARGV[2])), deadline, id)
local out = {}
enqueue(id, ARGV[2], now, out)
release_all(model_of(ARGV[2]), out)
return out
