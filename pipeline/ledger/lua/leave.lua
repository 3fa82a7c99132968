-- A worker goes in order, or a lost one is struck off. ARGV: worker.
local worker = ARGV[1]
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
