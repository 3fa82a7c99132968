-- Stops listing a queue that nobody serves, and drops the messages in it, if no request waits there: then they
-- are of requests that went elsewhere. ARGV: queue, the broker's lists of it. Returns 1 if it is forgotten.
local queue = ARGV[1]
if count('ZCARD', 'waiting:' .. queue) > 0 then return 0 end
redis.call('SREM', 'queues', queue)
redis.call('DEL', unpack(ARGV, 2))
return 1
