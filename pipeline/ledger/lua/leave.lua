-- A worker goes in order, or a lost one is struck off. ARGV: worker, 'lost' if others say so.
-- They may have looked long ago, and been frozen since: one that has a lease now is not lost.
local worker = ARGV[1]
if ARGV[2] == 'lost' and redis.call('EXISTS', 'lease:' .. worker) == 1 then return 0 end
redis.call('HDEL', 'slots', worker)
if redis.call('SCARD', 'running:' .. worker) > 0 then
  redis.call('DEL', 'lease:' .. worker)
  return 0
end
redis.call('HDEL', 'workers', worker)
redis.call('HDEL', 'drains', worker, worker .. ':comes_back')
redis.call('DEL', 'lease:' .. worker, 'cancels:' .. worker,
  'unacked.' .. worker, 'unacked_index.' .. worker, 'unacked_mutex.' .. worker)
return 1
