-- A worker's sign of life. ARGV: worker, lease ms, JSON of its state. Returns {now ms, cancelled ids, order, comes back, owned,
-- prompts}: the order is the time limit in s of a drain, or false; 'comes back' is '1' if another shall follow it; it
-- owns so many requests; prompts are its share of those that wait to be computed, by lane.
local worker = ARGV[1]

-- What waits for the prefill workers of a model, by lane, over their number.
local function waiting_prompts(queue)
  local num_held = redis.call('HMGET', of_model('num_held', model_of(queue)), unpack(LANES))
  local waiting, sum, workers = {}, 0, 0
  for rank, lane in ipairs(LANES) do
    waiting[rank] = tonumber(num_held[rank] or 0) + count('ZCARD', of_lane('released', queue, lane))
    sum = sum + waiting[rank]
  end
  if sum == 0 then return waiting end
  local slots = redis.call('HGETALL', 'slots')
  for i = 2, #slots, 2 do
    if string.find(cmsgpack.unpack(slots[i])[1], ' ' .. queue .. ' ', 1, true) then workers = workers + 1 end
  end
  for rank, number in ipairs(waiting) do waiting[rank] = math.ceil(number / math.max(1, workers)) end
  return waiting
end

local now = now_ms()
redis.call('SET', 'lease:' .. worker, now, 'PX', ARGV[2])
redis.call('HSET', 'workers', worker, cmsgpack.pack({now, ARGV[3]}))
local state = cjson.decode(ARGV[3])
if state.queues and not state.is_draining and not state.is_stuck then
  redis.call('HSET', 'slots', worker, cmsgpack.pack({' ' .. table.concat(state.queues, ' ') .. ' ',
    state.capacity or 0, state.max_ahead_tokens or 0, state.role ~= 'prefill', model_of(state.queues[1])}))
else
  redis.call('HDEL', 'slots', worker)
end
local waiting = {}
for _, queue in ipairs(state.queues or {}) do
  if string.sub(queue, 1, 8) == 'prefill.' then waiting = waiting_prompts(queue) end
end
return {now, redis.call('SPOP', 'cancels:' .. worker, 1000), redis.call('HGET', 'drains', worker),
  redis.call('HGET', 'drains', worker .. ':comes_back'), redis.call('SCARD', 'running:' .. worker),
  waiting}
