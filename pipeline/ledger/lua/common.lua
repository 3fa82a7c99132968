-- Shared by all scripts: names, the store's clock, and the one way a request ends.
-- Keys are built here, not passed: the ledger needs one Redis, not a cluster.
local function request_key(id) return 'request:' .. id end
local function tokens_key(id) return 'tokens:' .. id end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- Publishes one item to every gateway that watches the request.
-- item = {id, byte offset, bytes, ending, cached prompt tokens}
local function tell(watchers, item)
  for channel in string.gmatch(watchers or '', '%S+') do
    redis.call('PUBLISH', channel, cmsgpack.pack({item}))
  end
end

-- Takes a request out of every line it stands in.
local function leave_lines(id, owner, queue)
  if owner and owner ~= '' then redis.call('SREM', 'running:' .. owner, id) end
  if queue then redis.call('ZREM', 'waiting:' .. queue, id) end
end

local function finalize(id, ending, retention_s)
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'owner', 'queue')
  local state = 'finished'
  if ending == 'cancelled' then state = 'cancelled' end
  if string.sub(ending, 1, 6) == 'error:' then state = 'failed' end
  leave_lines(id, r[1], r[2])
  redis.call('ZREM', 'deadlines', id)
  redis.call('HSET', key, 'state', state, 'ending', ending, 'ended_ms', now_ms())
  redis.call('HDEL', key, 'prompt', 'salt')
  redis.call('EXPIRE', key, retention_s)
  redis.call('EXPIRE', tokens_key(id), retention_s)
  redis.call('HINCRBY', 'counters', state, 1)
end

-- Ends a request that no worker is writing, and tells its watchers.
local function finalize_and_tell(id, ending, retention_s)
  local r = redis.call('HMGET', request_key(id), 'watchers', 'cached')
  local offset = redis.call('STRLEN', tokens_key(id))
  finalize(id, ending, retention_s)
  tell(r[1], {id, offset, '', ending, tonumber(r[2] or 0)})
end

-- Puts a request (back) into a waiting line.
local function enqueue(id, queue, now)
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'queue_deadline_ms', 'deadline_ms')
  redis.call('HSET', key, 'state', 'queued', 'owner', '', 'queue', queue, 'queued_ms', now)
  redis.call('ZADD', 'waiting:' .. queue, now, id)
  redis.call('SADD', 'queues', queue)
  redis.call('ZADD', 'deadlines', math.min(now + tonumber(r[1]), tonumber(r[2])), id)
end
