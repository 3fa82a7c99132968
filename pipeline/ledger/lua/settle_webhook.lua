-- What became of a webhook that was taken. ARGV: id, ms until it is tried again, or '' when it is done with:
-- then its secret goes.
if ARGV[2] == '' then
  redis.call('ZREM', 'webhooks', ARGV[1])
  redis.call('HDEL', request_key(ARGV[1]), 'webhook', 'webhook_tries')
else
  redis.call('ZADD', 'webhooks', 'XX', now_ms() + tonumber(ARGV[2]), ARGV[1])
end
