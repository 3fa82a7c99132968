-- Releases what there is room for, after it struck off those whose deadline passed and whose key is gone: they
-- hold no room. Returns the messages to send, (id, queue, lane, ...).
local out, is_done = {}, {}
local now = now_ms()
local function strike_off_ghosts(open)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, MAX_RELEASES)) do
    if redis.call('EXISTS', request_key(id)) == 0 then redis.call('ZREM', open, id) end
  end
end
for _, queue in ipairs(redis.call('SMEMBERS', 'queues')) do
  local model = model_of(queue)
  if not is_done[model] then
    strike_off_ghosts(open_key(model))
    release_all(model, out)
  end
  is_done[model] = true
end
return out
