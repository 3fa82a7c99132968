-- Fails a request whose deadline has passed. ARGV: id, code while queued, retention s.
-- A running one is taken from its worker, whose later writes find no owner.
-- Returns 1 if it ended here.
local id = ARGV[1]
local key = request_key(id)
local due = redis.call('ZSCORE', 'deadlines', id)
if not due or tonumber(due) > now_ms() then return 0 end
local r = redis.call('HMGET', key, 'state', 'owner', 'deadline_ms')
if r[1] == 'queued' then
  local code = ARGV[2]
  if redis.call('STRLEN', tokens_key(id)) > 0 and now_ms() >= tonumber(r[3]) then code = 'deadline_exceeded' end
  finalize_and_tell(id, 'error:' .. code, ARGV[3])
  return 1
elseif r[1] == 'running' then
  finalize_and_tell(id, 'error:deadline_exceeded', ARGV[3])
  redis.call('HSET', key, 'owner', '')
  redis.call('SADD', 'cancels:' .. r[2], id)
  redis.call('PUBLISH', 'control:' .. r[2], id)
  return 1
end
redis.call('ZREM', 'deadlines', id)
return 0
