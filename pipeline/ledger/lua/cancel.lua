-- ARGV: id, retention s. A queued request ends here; a running one is stopped by its worker.
-- Returns the state that the request was in, or false.
local id = ARGV[1]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'owner')
if r[1] == 'queued' then
  finalize_and_tell(id, 'cancelled', ARGV[2])
elseif r[1] == 'running' then
  redis.call('HSET', key, 'cancel', 1)
  redis.call('SADD', 'cancels:' .. r[2], id)
  redis.call('EXPIRE', 'cancels:' .. r[2], 3600)
  redis.call('PUBLISH', 'control:' .. r[2], id)
end
return r[1]
