-- Takes webhooks that are due; they come again after a lease, should their taker die. ARGV: how many,
-- lease ms. Returns (id, webhook, state, how often it was tried before, ended ms, ...).
local now, out = now_ms(), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'webhooks', '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'webhook', 'state', 'ended_ms')
  if r[1] then
    redis.call('ZADD', 'webhooks', now + tonumber(ARGV[2]), id)
    local tries = redis.call('HINCRBY', key, 'webhook_tries', 1)
    for _, item in ipairs({id, r[1], r[2], tries - 1, r[3]}) do out[#out + 1] = item end
  else
    redis.call('ZREM', 'webhooks', id)
  end
end
return out
