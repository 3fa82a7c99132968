-- Takes a running request from a worker that is lost or gives it back, and raises the attempt, which
-- fences the worker's later writes. ARGV: id, worker, queue, 'lost' | 'returned', max attempts, retention s.
-- Returns {'queued', priority} | {'ended'} | {'not_owner'} | {'alive'}.
local id, worker, queue = ARGV[1], ARGV[2], ARGV[3]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'owner', 'losses', 'priority', 'cancel')
if r[1] ~= 'running' or r[2] ~= worker then
  redis.call('SREM', 'running:' .. worker, id)
  return {'not_owner', 0}
end
if ARGV[4] == 'lost' and redis.call('EXISTS', 'lease:' .. worker) == 1 then return {'alive', 0} end
if r[5] then finalize_and_tell(id, 'cancelled', ARGV[6]); return {'ended', 0} end
redis.call('HINCRBY', key, 'attempt', 1)
if ARGV[4] == 'lost' then
  local losses = redis.call('HINCRBY', key, 'losses', 1)
  if losses >= tonumber(ARGV[5]) then
    finalize_and_tell(id, 'error:worker_lost', ARGV[6])
    redis.call('LPUSH', 'dead_letters', id)
    redis.call('LTRIM', 'dead_letters', 0, 999)
    return {'ended', 0}
  end
end
redis.call('SREM', 'running:' .. worker, id)
enqueue(id, queue, now_ms())
redis.call('HINCRBY', 'counters', 'requeued', 1)
return {'queued', tonumber(r[4])}
