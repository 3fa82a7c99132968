-- Looks at a request whose time in `deadlines` has come: fails it if it is late, else says when to look
-- again. ARGV: id, code if it waited too long, retention s.
-- A running one is taken from its worker, whose later writes find no owner.
-- Returns what it was late with ('queue' | 'total' | 'first_token' | 'token_gap'), or false.
local id = ARGV[1]
local key = request_key(id)
local now = now_ms()
local score = redis.call('ZSCORE', 'deadlines', id)
if not score or tonumber(score) > now then return false end
local r = redis.call('HMGET', key, 'state', 'owner', 'deadline_ms', 'queued_ms', 'queue_deadline_ms',
  'first_limit_ms', 'gap_limit_ms', 'created_ms', 'seen_bytes', 'seen_ms')
if r[1] ~= 'queued' and r[1] ~= 'running' then
  redis.call('ZREM', 'deadlines', id)
  return false
end
local is_queued = r[1] == 'queued'
local first, gap = tonumber(r[6] or 0), tonumber(r[7] or 0)
local num_bytes = redis.call('STRLEN', tokens_key(id))
local why = false
if now >= tonumber(r[3]) + (is_queued and 0 or GRACE_MS) then
  why = 'total'
elseif is_queued and now >= tonumber(r[4]) + tonumber(r[5]) then
  why = 'queue'
elseif num_bytes == 0 then
  if first > 0 and now >= tonumber(r[8]) + first then why = 'first_token' end
elseif gap > 0 then
  if num_bytes ~= tonumber(r[9] or -1) then
    redis.call('HSET', key, 'seen_bytes', num_bytes, 'seen_ms', now)
  elseif now >= tonumber(r[10]) + gap then
    why = 'token_gap'
  end
end
if not why then
  redis.call('ZADD', 'deadlines', due_ms(id, now, is_queued), id)
  return false
end
local code = 'deadline_exceeded'
if is_queued and (why == 'queue' or num_bytes == 0) then code = ARGV[2] end
finalize_and_tell(id, 'error:' .. code, ARGV[3])
if not is_queued then
  redis.call('HSET', key, 'owner', '')
  redis.call('SADD', 'cancels:' .. r[2], id)
  redis.call('EXPIRE', 'cancels:' .. r[2], 3600)
  redis.call('PUBLISH', 'control:' .. r[2], id)
end
return why
