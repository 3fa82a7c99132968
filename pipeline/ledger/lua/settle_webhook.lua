-- What became of a webhook that was taken. ARGV: id, ms until it is tried again, or '' when it is done with:
-- then its secret goes. '1' behind them: nobody was told, so that was no try.
if ARGV[2] == '' then
  redis.call('ZREM', 'webhooks', ARGV[1])
  redis.call('HDEL', request_key(ARGV[1]), 'webhook', 'webhook_tries')
else
  redis.call('ZADD', 'webhooks', 'XX', now_ms() + tonumber(ARGV[2]), ARGV[1])
  -- Its job may have been forgotten meanwhile; a key made here would never go.
  if ARGV[3] and redis.call('HEXISTS', request_key(ARGV[1]), 'webhook_tries') == 1 then
    redis.call('HINCRBY', request_key(ARGV[1]), 'webhook_tries', -1)
  end
end
