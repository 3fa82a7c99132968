-- One call per engine step. ARGV: worker, retention s, n, then n times
-- (id, attempt, byte offset, bytes, ending or '', cached prompt tokens, cache use or '', packed item).
-- The packed item is what a gateway gets of it (MessagePack, see `tell`); the worker packs it, for it is
-- the hot path. Appends to the token logs, publishes once per gateway, collects cancellations.
-- Returns {cancelled ids, stale (id, attempt, ...), short (id, ...), messages to send (id, queue, lane, ...)}:
-- stale attempts were fenced off; a short log lost its end with the store and must be written again from
-- the start; messages are of requests that got the room of those that ended.
local worker, retention = ARGV[1], ARGV[2]
local stale, short, groups, out, cancelled = {}, {}, {}, {}, {}
local freed  -- the model that has room again; a worker serves one
local DESERTED_MS = 10000

-- A request that ends with its connection, of which no gateway hears any more: that of its client died. A
-- gateway that only lost its subscription is back sooner, and says so (watch.lua).
local function desert(ids)
  local now = now_ms()
  for _, id in ipairs(ids) do
    local r = redis.call('HMGET', request_key(id), 'tied', 'deserted_ms', 'state')
    if r[1] and r[3] == 'running' then
      if not r[2] then
        redis.call('HSET', request_key(id), 'deserted_ms', now)
      elseif now - tonumber(r[2]) > DESERTED_MS then
        redis.call('HSET', request_key(id), 'cancel', 1)
        cancelled[#cancelled + 1] = id
      end
    end
  end
end

-- True if the log now ends with these bytes at this offset.
local function append(log, offset, bytes)
  local length = redis.call('APPEND', log, bytes)
  if length == offset + #bytes then return true end
  -- Written before (the answer got lost), or the log was cut: put it as it was, or as it should be.
  local before = ''
  if length > #bytes then before = redis.call('GETRANGE', log, 0, length - #bytes - 1) end
  local is_short = #before < offset
  if not is_short then before = string.sub(before, 1, offset) .. bytes end
  redis.call('SET', log, before, 'KEEPTTL')
  return not is_short
end

local i = 4
for _ = 1, tonumber(ARGV[3]) do
  local id, offset, bytes, ending = ARGV[i], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'owner', 'attempt', 'watchers', 'owed', 'trial', 'state', 'cancel')
  if r[1] ~= worker or r[2] ~= ARGV[i + 1] then
    stale[#stale + 1] = id
    stale[#stale + 1] = ARGV[i + 1]
  elseif is_final(r[6]) and ending == '' then
    -- Ended by somebody else, of which the worker has not heard: it must not go on.
    stale[#stale + 1] = id
    stale[#stale + 1] = ARGV[i + 1]
  elseif is_final(r[6]) then
    -- Ended by an earlier call, whose answer got lost. Its watchers were told.
  elseif #bytes > 0 and not append(tokens_key(id), offset, bytes) then
    short[#short + 1] = id
  else
    -- Said with every step: the worker may have missed it, or not have had the request when it was told.
    if r[7] and ending == '' then
      redis.call('SREM', 'cancels:' .. worker, id)
      cancelled[#cancelled + 1] = id
    end
    local item = ARGV[i + 7]
    if r[4] then freed = settle(id, r[4]) end
    if r[5] and #bytes > 0 then pass_trial(id, now_ms(), out) end
    if offset == 0 then
      redis.call('HSETNX', key, 'cached', ARGV[i + 5])
      if ARGV[i + 6] ~= '' then redis.call('HSETNX', key, 'cache_use', ARGV[i + 6]) end
      redis.call('HSETNX', key, 'first_ms', now_ms())
      redis.call('EXPIRE', tokens_key(id), 86400)
    elseif ARGV[i + 6] ~= '' then
      redis.call('HSET', key, 'resumed_use', ARGV[i + 6])
    end
    if ending ~= '' then
      -- What the first attempt found cached counts, whoever ends it.
      local cached = tonumber(redis.call('HGET', key, 'cached') or 0)
      item = cmsgpack.pack({id, offset, bytes, ending, cached})
      freed = finalize(id, ending, retention) or freed
    end
    local watchers = r[3] or ''
    local group = groups[watchers]
    if not group then group = {ids = {}}; groups[watchers] = group end
    group[#group + 1] = item
    group.ids[#group] = id
  end
  i = i + 8
end
for watchers, items in pairs(groups) do
  -- MessagePack array of up to 2^16 items.
  local count = #items
  local message = string.char(0xdc, math.floor(count / 256), count % 256) .. table.concat(items)
  local num_heard = 0
  for channel in string.gmatch(watchers, '%S+') do
    num_heard = num_heard + redis.call('PUBLISH', channel, message)
  end
  if num_heard == 0 then desert(items.ids) end
end
if freed then release_all(freed, out) end
for _, id in ipairs(redis.call('SPOP', 'cancels:' .. worker, 1000)) do cancelled[#cancelled + 1] = id end
return {cancelled, stale, short, out}
