-- A worker's sign of life. ARGV: worker, lease ms, JSON of its state. Returns {now ms, cancelled ids}.
local worker = ARGV[1]
local now = now_ms()
redis.call('SET', 'lease:' .. worker, now, 'PX', ARGV[2])
redis.call('HSET', 'workers', worker, cmsgpack.pack({now, ARGV[3]}))
return {now, redis.call('SPOP', 'cancels:' .. worker, 1000)}
