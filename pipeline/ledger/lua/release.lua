-- Releases what there is room for. Returns the messages to send, (id, queue, lane, ...).
local out, is_done = {}, {}
for _, queue in ipairs(redis.call('SMEMBERS', 'queues')) do
  local model = model_of(queue)
  if not is_done[model] then release_all(model, out) end
  is_done[model] = true
end
return out
