-- Moves a waiting request to another queue; its time of waiting goes on. ARGV: id, from, to.
-- Returns the messages to send, (id, queue, lane, ...), or false if it no longer waits there.
local id, from, to = ARGV[1], ARGV[2], ARGV[3]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'queue')
if r[1] ~= 'queued' or r[2] ~= from then
  if not r[1] then redis.call('ZREM', 'waiting:' .. from, id) end
  return false
end
local now = now_ms()
local since = tonumber(redis.call('ZSCORE', 'waiting:' .. from, id) or now)
leave_lines(id)
local out = {}
line_up(id, to, since, now, out)
release_all(model_of(to), out)
return out
