-- Makes a gateway hear of a request and replays what is there already, in one atomic step.
-- ARGV: id, channel, byte offset.
-- Returns {ending or '', log from offset, record bytes, prompt tokens, cached tokens} or false.
local id, channel = ARGV[1], ARGV[2]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'watchers', 'ending', 'record_bytes', 'num_prompt', 'cached')
if not r[1] then return false end
local known = r[2] or ''
if not string.find(' ' .. known .. ' ', ' ' .. channel .. ' ', 1, true) then
  -- The newest eight watch; an older one falls back on reading the log now and then.
  local names = {channel}
  for name in string.gmatch(known, '%S+') do if #names < 8 then names[#names + 1] = name end end
  redis.call('HSET', key, 'watchers', table.concat(names, ' '))
end
redis.call('HDEL', key, 'deserted_ms')
local log = redis.call('GETRANGE', tokens_key(id), ARGV[3], -1)
return {r[3] or '', log, tonumber(r[4]), tonumber(r[5]), tonumber(r[6] or 0)}
