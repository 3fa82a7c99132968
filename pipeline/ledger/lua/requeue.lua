-- Takes a running request from a worker that is lost or gives it back, and raises the attempt, which
-- fences the worker's later writes. ARGV: id, worker, queue, 'lost' | 'returned', max attempts,
-- retention s, retention of a dead letter s, pause before the third attempt in ms.
-- Returns the messages to send, (id, queue, lane, ...), or false if it is not queued again.
local id, worker, queue = ARGV[1], ARGV[2], ARGV[3]
local key = request_key(id)
local now = now_ms()
local MAX_PAUSE_MS = 8000
local r = redis.call('HMGET', key, 'state', 'owner', 'losses', 'cancel', 'queue')
if r[1] ~= 'running' or r[2] ~= worker then
  redis.call('SREM', 'running:' .. worker, id)
  return false
end
if ARGV[4] == 'lost' and redis.call('EXISTS', 'lease:' .. worker) == 1 then return false end
if r[4] then finalize_and_tell(id, 'cancelled', ARGV[6]); return false end
redis.call('HINCRBY', key, 'attempt', 1)
if ARGV[4] == 'lost' then
  -- What the verdict says (convict.lua); without one, everybody is charged.
  local charge = tonumber(redis.call('HGET', 'crash:' .. worker, id) or 1)
  local losses = redis.call('HINCRBY', key, 'losses', charge)
  local crashed = redis.call('HGET', key, 'crashed') or ''
  redis.call('HSET', key, 'crashed', crashed .. worker .. ' ')
  -- Lost again, and nobody else is proven guilty: it goes on alone.
  if crashed ~= '' and charge > 0 then
    redis.call('HSET', key, 'trial', 1)
  else
    redis.call('HDEL', key, 'trial')
  end
  end_trial(id, model_of(r[5]))
  if losses >= tonumber(ARGV[5]) then
    finalize_and_tell(id, 'error:worker_lost', ARGV[7], true)
    redis.call('LPUSH', 'dead_letters', id)
    for _, old in ipairs(redis.call('LRANGE', 'dead_letters', 1000, -1)) do
      redis.call('HDEL', request_key(old), 'prompt', 'salt')
    end
    redis.call('LTRIM', 'dead_letters', 0, 999)
    return false
  end
  -- The first loss may be anybody's fate and costs no time. Later ones are spaced, each pause twice the
  -- one before.
  if losses > 1 then
    local pause = math.min(MAX_PAUSE_MS, tonumber(ARGV[8]) * 2 ^ (losses - 2))
    redis.call('HSET', key, 'rests_until', now + pause)
  end
end
redis.call('SREM', 'running:' .. worker, id)
local out = {}
enqueue(id, queue, now, out)
redis.call('HINCRBY', 'counters', 'requeued', 1)
return out
