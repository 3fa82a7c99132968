-- One call per engine step. ARGV: worker, retention s, n, then n times
-- (id, attempt, byte offset, bytes, ending or '', cached prompt tokens).
-- Appends to the token logs, publishes once per gateway, collects cancellations.
-- Returns {cancelled ids, stale (id, attempt, ...), short (id, ...)}: stale attempts were fenced off;
-- a short log lost its end with the store and must be written again from the start.
local worker, retention = ARGV[1], ARGV[2]
local stale, short, groups = {}, {}, {}
local i = 4
for _ = 1, tonumber(ARGV[3]) do
  local id, attempt, offset, bytes, ending, cached =
    ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  i = i + 6
  local key, log = request_key(id), tokens_key(id)
  local r = redis.call('HMGET', key, 'owner', 'attempt', 'watchers', 'first_ms', 'cached')
  if r[1] ~= worker or r[2] ~= attempt then
    stale[#stale + 1] = id
    stale[#stale + 1] = attempt
  elseif redis.call('STRLEN', log) < offset then
    short[#short + 1] = id
  else
    if not r[5] then redis.call('HSET', key, 'cached', cached); r[5] = cached end
    if #bytes > 0 then
      if not r[4] then redis.call('HSET', key, 'first_ms', now_ms()) end
      redis.call('SETRANGE', log, offset, bytes)
      if offset == 0 then redis.call('EXPIRE', log, 86400) end
    end
    if ending ~= '' then finalize(id, ending, retention) end
    local item = {id, offset, bytes, ending, tonumber(r[5] or 0)}
    for channel in string.gmatch(r[3] or '', '%S+') do
      local group = groups[channel]
      if not group then group = {}; groups[channel] = group end
      group[#group + 1] = item
    end
  end
end
for channel, items in pairs(groups) do redis.call('PUBLISH', channel, cmsgpack.pack(items)) end
return {redis.call('SPOP', 'cancels:' .. worker, 1000), stale, short}
