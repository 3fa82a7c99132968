-- Takes a request in, or refuses it before anything is queued.
-- ARGV: id, queue, expiry s, prefill tokens per second (0: unknown), the four limits (requests that
-- wait, prompt tokens that wait, open requests of a tenant, of a model; 0: none), then field, value ...
-- Returns {'ok', '', 0, messages to send (id, queue, lane, ...)} | {'exists'}
--   | {'full', what, predicted wait ms, how many}, what being one of
--     'waiting' | 'tokens' | 'tenant' | 'model' | 'deadline'.
local id, queue = ARGV[1], ARGV[2]
local key = request_key(id)
local f = {}
for i = 9, #ARGV, 2 do f[ARGV[i]] = ARGV[i + 1] end
local known = redis.call('HMGET', key, 'state', 'submission', 'queue', 'lane')
if known[1] then
  -- The same call once more: the answer to it got lost.
  if known[2] ~= f.submission then return {'exists'} end
  if known[1] == 'queued' and known[4] then return {'ok', '', 0, {id, known[3], known[4]}} end
  return {'ok', '', 0, {}}
end
local now = now_ms()
local limits = {}
for i = 5, 8 do limits[i - 4] = tonumber(ARGV[i]) end
local rank = 1
for i, lane in ipairs(LANES) do if lane == f.priority then rank = i end end
local model = model_of(queue)
-- Of anybody but batches, and refused or not: it makes them leave more places free.
if f.priority ~= '9' then redis.call('SET', of_model('asked_lately', model), 1, 'EX', LATELY_S) end
local s = survey(queue)

-- How long it would wait, from the pace of releases and from the prompt tokens that lie before it. Fair
-- shares let a tenant pass by the rest of another's line.
local function predicted_wait_ms()
  local line = count('ZCARD', line_key(queue, f.priority, f.tenant))
  local lines = of_lane('lines', queue, f.priority)
  local num_tenants = count('ZCARD', lines) + (line == 0 and 1 or 0)
  local num_before, num_held = 0, 0
  for i, lane in ipairs(LANES) do
    local held = tonumber(redis.call('HGET', of_model('num_held', model), lane) or 0)
    num_held = num_held + held
    if i <= rank then num_before = num_before + held end
  end
  num_before = math.min(num_before, (line + 1) * num_tenants)
  local wait = num_before * tonumber(redis.call('GET', of_model('pace_ms', model)) or 0)
  local rate = tonumber(ARGV[4])
  if rate > 0 then
    local share = num_held > 0 and num_before / num_held or 1
    local owed = tonumber(redis.call('GET', of_model('owed_tokens', model)) or 0)
    wait = math.max(wait, 1000 * owed * share / rate)
  end
  return math.floor(wait)
end

local function num_open(name)
  redis.call('ZREMRANGEBYSCORE', name, '-inf', now - 3600000)  -- left over from a lost key
  return count('ZCARD', name)
end

-- (What is full, how many there are), or nothing.
local function find_full(wait)
  local mine = 'open:tenant:' .. f.tenant
  local open = count('ZCARD', open_key(model))
  if open >= s.all_places then open = num_open(open_key(model)) end
  if limits[3] > 0 and num_open(mine) >= limits[3] then return 'tenant', limits[3] end
  if limits[4] > 0 and open >= limits[4] then return 'model', limits[4] end
  -- Batches leave the last quarter of the waiting room to others.
  local num_seats = f.priority == '9' and math.ceil(0.75 * limits[1]) or limits[1]
  if limits[1] > 0 and open >= s.all_places + num_seats then return 'waiting', open - s.all_places end
  local owed = tonumber(redis.call('GET', of_model('owed_tokens', model)) or 0)
  if limits[2] > 0 and owed > 0 and owed + tonumber(f.num_prompt) > limits[2] then return 'tokens', owed end
  if wait > tonumber(f.queue_deadline_ms) then return 'deadline', open end
end

local wait = predicted_wait_ms()
local what, num = find_full(wait)
if what then
  redis.call('HINCRBY', 'counters', 'refused', 1)
  return {'full', what, wait, num}
end
local deadline = now + tonumber(f.total_deadline_ms)
redis.call('HSET', key, 'attempt', 1, 'losses', 0, 'created_ms', now, 'deadline_ms', deadline,
  'owed', f.num_prompt, 'state', 'queued', 'owner', '', 'queue', queue, 'queued_ms', now,
  unpack(ARGV, 9))
redis.call('EXPIRE', key, ARGV[3])
redis.call('INCRBY', of_model('owed_tokens', model), f.num_prompt)
redis.call('ZADD', 'open:tenant:' .. f.tenant, deadline, id)
redis.call('ZADD', open_key(model), deadline, id)
redis.call('HINCRBY', 'counters', 'submitted', 1)
if f.listed then
  -- The newest of a tenant; those whose request is gone are struck off when the list is read.
  local jobs = 'jobs:' .. f.tenant
  redis.call('ZADD', jobs, now, id)
  redis.call('ZREMRANGEBYRANK', jobs, 0, -10001)
  local left = tonumber(ARGV[3]) + 86400
  if redis.call('TTL', jobs) < left then redis.call('EXPIRE', jobs, left) end
end
local out = {}
if not is_unplaced(queue) and count('SCARD', of_model('held', model)) == 0 and has_room(s, rank) then
  redis.call('ZADD', 'waiting:' .. queue, now, id)
  redis.call('SADD', 'queues', queue)
  release(id, queue, f.priority, now, out)
else
  line_up(id, queue, now, now, out)
end
redis.call('ZADD', 'deadlines', due_ms(id, now, true), id)
release_all(model, out)
return {'ok', '', 0, out}
