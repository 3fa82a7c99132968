-- Shared by all scripts: names, the store's clock, the lines that requests wait in, and the one way a
-- request ends. Keys are built here, not passed: the ledger needs one Redis, not a cluster.
--
-- A queued request is held (it stands in its tenant's line, no message exists) or released (its message
-- is in the broker, or on its way). A request that has begun is never held again; one that lost several
-- workers may rest for a while first.
local LANES = {'0', '3', '6', '9'}       -- the priorities; a lane is the priority of a message
local SHARES = {1, 1, 0.9, 0.75}         -- of all places that a priority may fill
local ALONE = 0.9                        -- the least share of one that nobody else has asked beside
local LATELY_S = 60                      -- for so long
local AGEING_MS = 10000                  -- a priority that waits this long counts as one higher
local GRACE_MS = 250                     -- workers end what is late; the store steps in after this
local MAX_RELEASES = 64                  -- in one script call
local TRIAL_S = 10

local function request_key(id) return 'request:' .. id end
local function tokens_key(id) return 'tokens:' .. id end
local function of_lane(name, queue, lane) return name .. ':' .. queue .. ':' .. lane end
local function is_unplaced(queue) return string.sub(queue, 1, 8) == 'unplaced' end
local function line_key(queue, lane, tenant) return 'line:' .. queue .. ':' .. lane .. ':' .. tenant end

-- Each model has its own places, lines, limits and trials: a jammed one holds no other. The name of a queue
-- says whose it is (keys.py): prefill.MODEL, decode.MODEL.NODE, unplaced.MODEL. Queues of the time when
-- there was one model name none; they are one of their own until they are empty.
local models = {}
local function model_of(queue)
  if not queue then return '' end  -- of a request whose key is gone
  local model = models[queue]
  if not model then
    local kind, name, rest = string.match(queue, '^(%l+)%.([%w_-]+)(%.?)')
    model = kind and (kind == 'decode') == (rest == '.') and name or ''
    models[queue] = model
  end
  return model
end
local function of_model(name, model) return model == '' and name or name .. ':' .. model end
local function open_key(model) return 'open:model:' .. model end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function count(command, key) return redis.call(command, key) end

-- Publishes one item to every gateway that watches the request.
-- item = {id, byte offset, bytes, ending, cached prompt tokens}
local function tell(watchers, item)
  for channel in string.gmatch(watchers or '', '%S+') do
    redis.call('PUBLISH', channel, cmsgpack.pack({item}))
  end
end

-- Room. `slots` holds what each living worker may take, from its heartbeat:
-- worker -> {queues between spaces, places, prompt tokens that may lie ahead (0: any), decodes, model}.

local function survey(queue)
  local model = model_of(queue)
  local s = {model = model, places = 0, spare = 0, busy = 0, tokens = 0, is_bounded = true,
             all_places = 0, all_spare = 0}
  local slots = redis.call('HGETALL', 'slots')
  for i = 1, #slots, 2 do
    local w = cmsgpack.unpack(slots[i + 1])
    -- What a worker may hold beyond its places, so that the next is there when one ends.
    local spare = math.min(4, 1 + math.floor(w[2] / 8))
    if w[2] == 0 then spare = 0 end
    if w[4] and (w[5] or '') == model then
      s.all_places = s.all_places + w[2]
      s.all_spare = s.all_spare + spare
    end
    if string.find(w[1], ' ' .. queue .. ' ', 1, true) then
      s.places = s.places + w[2]
      s.spare = s.spare + spare
      s.busy = s.busy + count('SCARD', 'running:' .. slots[i])
      s.tokens = s.tokens + w[3]
      if w[3] == 0 then s.is_bounded = false end
    end
  end
  s.in_flight = count('ZCARD', open_key(model)) - count('SCARD', of_model('held', model))
  s.is_alone = redis.call('EXISTS', of_model('asked_lately', model)) == 0
  s.ahead, s.released = {}, {}
  for rank, lane in ipairs(LANES) do
    s.ahead[rank] = tonumber(redis.call('HGET', of_model('ahead', model), lane) or 0)
    s.released[rank] = count('ZCARD', of_lane('released', queue, lane))
  end
  return s
end

-- True if one more request may go to the queue's workers at this rank of LANES. What is released at
-- lower priorities does not count: it is overtaken.
local function has_room(s, rank)
  if s.places == 0 then return false end
  local released, later, ahead = 0, 0, 0
  for other = 1, #LANES do
    if other <= rank then
      released = released + s.released[other]
      ahead = ahead + s.ahead[other]
    else
      later = later + s.released[other]
    end
  end
  local share = s.is_alone and math.max(SHARES[rank], ALONE) or SHARES[rank]
  local here = math.max(1, math.floor(s.places * share)) + s.spare - s.busy - released
  local everywhere = math.max(1, math.floor(s.all_places * share)) + s.all_spare - s.in_flight + later
  return here > 0 and everywhere > 0 and not (s.is_bounded and ahead >= s.tokens)
end

-- Prompt tokens. `owed_tokens` are accepted and not computed; `ahead` those of them that were released,
-- by lane. The fields `owed` and `ahead` of a request say what it still counts for.

-- Returns the request's model.
local function settle(id, owed)
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'ahead', 'queue')
  local model = model_of(r[2])
  redis.call('INCRBY', of_model('owed_tokens', model), -tonumber(owed))
  if r[1] then redis.call('HINCRBY', of_model('ahead', model), r[1], -tonumber(owed)) end
  redis.call('HDEL', key, 'owed', 'ahead')
  return model
end

-- Lines. Between tenants of one queue and priority: start-time fair queueing (Goyal, Vin, Cheng 1996).
-- `lines` holds the start tag of each tenant's first request, `finish` the tag where the tenant goes on,
-- `virtual` the tag of what was released last. A request costs its tokens.

local function forget_lines_if_empty(queue, lane)
  if count('ZCARD', of_lane('lines', queue, lane)) > 0 then return end
  redis.call('DEL', of_lane('finish', queue, lane), of_lane('virtual', queue, lane))
  redis.call('HDEL', 'turns:' .. queue, lane)
  for _, other in ipairs(LANES) do
    if count('ZCARD', of_lane('lines', queue, other)) > 0 then return end
  end
  redis.call('SREM', of_model('held_queues', model_of(queue)), queue)
  redis.call('DEL', 'turns:' .. queue)
end

local function hold(id, queue, since)
  local r = redis.call('HMGET', request_key(id), 'priority', 'tenant')
  local lane, tenant = r[1], r[2]
  local lines = of_lane('lines', queue, lane)
  if count('ZCARD', lines) == 0 then
    redis.call('HSET', 'turns:' .. queue, lane, now_ms())
    redis.call('HSETNX', 'turns:' .. queue, 'last', now_ms())
    redis.call('SADD', of_model('held_queues', model_of(queue)), queue)
  end
  if not redis.call('ZSCORE', lines, tenant) then
    local virtual = tonumber(redis.call('GET', of_lane('virtual', queue, lane)) or 0)
    local finish = tonumber(redis.call('HGET', of_lane('finish', queue, lane), tenant) or 0)
    redis.call('ZADD', lines, math.max(virtual, finish), tenant)
  end
  redis.call('ZADD', line_key(queue, lane, tenant), since, id)
  local model = model_of(queue)
  redis.call('SADD', of_model('held', model), id)
  redis.call('HINCRBY', of_model('num_held', model), lane, 1)
end

-- Takes a held request out of its line; nothing if it is not held.
local function unhold(id, queue, lane, tenant)
  local model = model_of(queue)
  local held, num_held = of_model('held', model), of_model('num_held', model)
  if redis.call('SREM', held, id) == 0 then return end
  redis.call('HINCRBY', num_held, lane, -1)
  if count('SCARD', held) == 0 then redis.call('DEL', num_held) end
  local line = line_key(queue, lane, tenant)
  redis.call('ZREM', line, id)
  if count('ZCARD', line) == 0 then redis.call('ZREM', of_lane('lines', queue, lane), tenant) end
end

-- Marks a request whose message is to be sent now; `out` collects (id, queue, lane) for the publisher.
local function release(id, queue, lane, now, out)
  local key = request_key(id)
  redis.call('ZADD', of_lane('released', queue, lane), now, id)
  redis.call('HSET', key, 'lane', lane, 'released_ms', now)
  local owed = redis.call('HGET', key, 'owed')
  if owed and redis.call('HSETNX', key, 'ahead', lane) == 1 then
    redis.call('HINCRBY', of_model('ahead', model_of(queue)), lane, owed)
  end
  out[#out + 1], out[#out + 2], out[#out + 3] = id, queue, lane
end

-- Trials. A request that was on two lost workers goes on alone: the next such one is released when it has
-- written a token, or ended, or TRIAL_S are over. So a request that kills its worker is found out.
local function next_trial(model, now, out)
  local on_trial = of_model('on_trial', model)
  while redis.call('EXISTS', on_trial) == 0 do
    local id = redis.call('LPOP', of_model('trials', model))
    if not id then return end
    local r = redis.call('HMGET', request_key(id), 'state', 'queue', 'lane', 'trial', 'priority')
    if r[1] == 'queued' and not is_unplaced(r[2]) and not r[3] and r[4] then
      redis.call('SET', on_trial, id, 'EX', TRIAL_S)
      release(id, r[2], r[5], now, out)
    end
  end
end

local function end_trial(id, model)
  local on_trial = of_model('on_trial', model)
  if redis.call('GET', on_trial) == id then redis.call('DEL', on_trial) end
end

local function pass_trial(id, now, out)
  local model = model_of(redis.call('HGET', request_key(id), 'queue'))
  redis.call('HDEL', request_key(id), 'trial')
  end_trial(id, model)
  next_trial(model, now, out)
end

-- Ranks of LANES that have somebody in line, the next to be served first: {rank, rank to serve at}.
-- A priority that was passed over for AGEING_MS counts as one higher, for one request.
local function classes(queue, now)
  local found = {}
  for rank, lane in ipairs(LANES) do
    if count('ZCARD', of_lane('lines', queue, lane)) > 0 then
      local since = tonumber(redis.call('HGET', 'turns:' .. queue, lane) or now)
      local aged = rank - (now - since) / AGEING_MS
      found[#found + 1] = {rank, math.max(1, math.min(rank, math.ceil(aged))), aged}
    end
  end
  table.sort(found, function(a, b) return a[3] < b[3] end)
  return found
end

local function release_first(queue, rank, at_rank, now, out)
  local lane = LANES[rank]
  local lines = of_lane('lines', queue, lane)
  local head = redis.call('ZRANGE', lines, 0, 0, 'WITHSCORES')
  local tenant, start = head[1], tonumber(head[2])
  local line = line_key(queue, lane, tenant)
  local id = redis.call('ZRANGE', line, 0, 0)[1]
  if not id then redis.call('ZREM', lines, tenant); return end
  unhold(id, queue, lane, tenant)
  local r = redis.call('HMGET', request_key(id), 'num_prompt', 'expected', 'state')
  if r[3] ~= 'queued' then redis.call('ZREM', 'waiting:' .. queue, id); return end  -- its key is gone
  local finish = start + tonumber(r[1] or 1) + tonumber(r[2] or 0)
  redis.call('SET', of_lane('virtual', queue, lane), start)
  redis.call('HSET', of_lane('finish', queue, lane), tenant, finish)
  redis.call('HSET', request_key(id), 'charged', queue)
  if count('ZCARD', line) > 0 then redis.call('ZADD', lines, finish, tenant) end
  local turns = 'turns:' .. queue
  local last = tonumber(redis.call('HGET', turns, 'last') or now)
  local pace_ms = of_model('pace_ms', model_of(queue))
  local pace = tonumber(redis.call('GET', pace_ms) or 0)
  if pace == 0 then pace = now - last else pace = pace + 0.1 * (now - last - pace) end
  redis.call('SET', pace_ms, tostring(pace), 'EX', 3600)
  redis.call('HSET', turns, lane, now, 'last', now)
  forget_lines_if_empty(queue, lane)
  release(id, queue, LANES[at_rank], now, out)
end

-- Releases what the workers of a queue have room for, in fair order.
local function release_from(queue, out)
  local now = now_ms()
  local s = survey(queue)
  for _ = 1, MAX_RELEASES do
    local is_done = true
    for _, class in ipairs(classes(queue, now)) do
      if has_room(s, class[2]) then
        release_first(queue, class[1], class[2], now, out)
        s.released[class[2]] = s.released[class[2]] + 1
        s.in_flight = s.in_flight + 1
        s.ahead[class[2]] = tonumber(redis.call('HGET', of_model('ahead', s.model), LANES[class[2]]) or 0)
        is_done = false
        break
      end
    end
    if is_done then return end
  end
end

-- Puts a request that stands in no line into one: it rests, or is released if it has
-- begun, or held.
local function line_up(id, queue, since, now, out)
  local key = request_key(id)
  redis.call('HDEL', key, 'lane')
  redis.call('HSET', key, 'queue', queue)
  redis.call('ZADD', 'waiting:' .. queue, since, id)
  redis.call('SADD', 'queues', queue)
  if is_unplaced(queue) then return end
  local r = redis.call('HMGET', key, 'priority', 'begun', 'trial', 'rests_until')
  if r[4] and tonumber(r[4]) > now then
    redis.call('ZADD', 'resting', r[4], id)
  elseif r[3] then
    local model = model_of(queue)
    redis.call('RPUSH', of_model('trials', model), id)
    next_trial(model, now, out)
  elseif r[2] then
    release(id, queue, r[1], now, out)
  else
    hold(id, queue, since)
  end
end

-- Rests. A request that lost more than one worker waits a little before it is given to another.
local function wake_rested(now, out)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'resting', 0, now, 'LIMIT', 0, MAX_RELEASES)) do
    redis.call('ZREM', 'resting', id)
    local r = redis.call('HMGET', request_key(id), 'state', 'queue')
    if r[1] == 'queued' then
      line_up(id, r[2], tonumber(redis.call('ZSCORE', 'waiting:' .. r[2], id) or now), now, out)
    end
  end
end

-- Releases what the workers of a model have room for.
local function release_all(model, out)
  wake_rested(now_ms(), out)
  if redis.call('EXISTS', of_model('trials', model)) == 1 then next_trial(model, now_ms(), out) end
  if count('SCARD', of_model('held', model)) == 0 then return end
  local queues = redis.call('SMEMBERS', of_model('held_queues', model))
  for _, queue in ipairs(queues) do release_from(queue, out) end
end

-- Takes a request out of every line it stands in.
local function leave_lines(id, owner)
  local key = request_key(id)
  if owner and owner ~= '' then redis.call('SREM', 'running:' .. owner, id) end
  local r = redis.call('HMGET', key, 'queue', 'lane', 'priority', 'tenant')
  if not r[1] then return end
  redis.call('ZREM', 'waiting:' .. r[1], id)
  redis.call('ZREM', 'resting', id)
  if r[2] then
    redis.call('ZREM', of_lane('released', r[1], r[2]), id)
  else
    unhold(id, r[1], r[3], r[4])
    forget_lines_if_empty(r[1], r[3])
  end
end

-- When the store has to look at a request again.
local function due_ms(id, now, is_queued)
  local r = redis.call('HMGET', request_key(id), 'deadline_ms', 'queue_deadline_ms', 'first_limit_ms',
    'gap_limit_ms', 'created_ms', 'queued_ms')
  local due = tonumber(r[1]) + GRACE_MS
  if is_queued then due = math.min(tonumber(r[1]), tonumber(r[6]) + tonumber(r[2])) end
  local first, gap = tonumber(r[3] or 0), tonumber(r[4] or 0)
  local is_silent = redis.call('EXISTS', tokens_key(id)) == 0
  if first > 0 and is_silent then due = math.min(due, tonumber(r[5]) + first) end
  -- Looked at now and then, so that the hot path need not note the time of every token.
  if gap > 0 then due = math.min(due, now + math.max(100, math.floor(gap / 10))) end
  return due
end

-- What a tenant was charged for output beyond what came, or below it, moves its place in the line.
local function correct_charge(id)
  local r = redis.call('HMGET', request_key(id), 'charged', 'priority', 'tenant', 'expected', 'record_bytes')
  if not r[1] then return end
  local finishes = of_lane('finish', r[1], r[2])
  local finish = tonumber(redis.call('HGET', finishes, r[3]) or nil)
  if not finish then return end
  local num_output = redis.call('STRLEN', tokens_key(id)) / tonumber(r[5])
  local virtual = tonumber(redis.call('GET', of_lane('virtual', r[1], r[2])) or 0)
  finish = math.max(virtual, finish + num_output - tonumber(r[4] or 0))
  redis.call('HSET', finishes, r[3], finish)
  redis.call('ZADD', of_lane('lines', r[1], r[2]), 'XX', finish, r[3])
end

local function is_final(state) return state == 'finished' or state == 'cancelled' or state == 'failed' end

-- A dead letter keeps its prompt, so that it can be tried again. Returns the request's model.
local function finalize(id, ending, retention_s, is_dead_letter)
  local key = request_key(id)
  local r = redis.call('HMGET', key, 'owner', 'state', 'owed', 'tenant', 'queue', 'trial', 'webhook')
  if is_final(r[2]) then return end  -- the answer to an earlier try got lost
  local state = 'finished'
  if ending == 'cancelled' then state = 'cancelled' end
  if string.sub(ending, 1, 6) == 'error:' then state = 'failed' end
  if r[3] then settle(id, r[3]) end
  local model = model_of(r[5])
  if r[6] then end_trial(id, model) end
  leave_lines(id, r[1])
  correct_charge(id)
  redis.call('ZREM', 'deadlines', id)
  redis.call('ZREM', 'open:tenant:' .. (r[4] or ''), id)
  redis.call('ZREM', open_key(model), id)
  redis.call('HSET', key, 'state', state, 'ending', ending, 'ended_ms', now_ms())
  if not is_dead_letter then redis.call('HDEL', key, 'prompt', 'salt') end
  redis.call('EXPIRE', key, retention_s)
  redis.call('EXPIRE', tokens_key(id), retention_s)
  if r[7] then redis.call('ZADD', 'webhooks', now_ms(), id) end
  redis.call('HINCRBY', 'counters', state, 1)
  if count('ZCARD', open_key(model)) == 0 then
    redis.call('DEL', of_model('owed_tokens', model), of_model('ahead', model))
  end
  return model
end

-- Ends a request that no worker is writing, and tells its watchers.
local function finalize_and_tell(id, ending, retention_s, is_dead_letter)
  local r = redis.call('HMGET', request_key(id), 'watchers', 'cached')
  local offset = redis.call('STRLEN', tokens_key(id))
  finalize(id, ending, retention_s, is_dead_letter)
  tell(r[1], {id, offset, '', ending, tonumber(r[2] or 0)})
end

-- Puts a request (back) into a queue.
local function enqueue(id, queue, now, out)
  redis.call('HSET', request_key(id), 'state', 'queued', 'owner', '', 'queued_ms', now)
  line_up(id, queue, now, now, out)
  redis.call('ZADD', 'deadlines', due_ms(id, now, true), id)
end
