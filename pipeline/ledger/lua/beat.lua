-- A worker's sign of life. ARGV: worker, lease ms, JSON of its state. Returns {now ms, cancelled ids, order, comes back, owned}:
-- the order is the time limit in s of a drain, or false; 'comes back' is '1' if another shall follow it; it owns
-- so many requests.
local worker = ARGV[1]
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
return {now, redis.call('SPOP', 'cancels:' .. worker, 1000), redis.call('HGET', 'drains', worker),
  redis.call('HGET', 'drains', worker .. ':comes_back'), redis.call('SCARD', 'running:' .. worker)}
