-- Moves a waiting request to another queue; its time of waiting goes on. ARGV: id, from, to.
-- Returns the request's priority, or -1 if it no longer waits there.
local id, from, to = ARGV[1], ARGV[2], ARGV[3]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'queue', 'priority')
if r[1] ~= 'queued' or r[2] ~= from then
  if not r[1] then redis.call('ZREM', 'waiting:' .. from, id) end
  return -1
end
local since = redis.call('ZSCORE', 'waiting:' .. from, id) or now_ms()
redis.call('ZREM', 'waiting:' .. from, id)
redis.call('ZADD', 'waiting:' .. to, since, id)
redis.call('SADD', 'queues', to)
redis.call('HSET', key, 'queue', to)
return tonumber(r[3])
