-- ARGV: id, worker, retention s, then the queues that the worker serves.
-- Only a queued request can be claimed, so a message that comes twice finds nothing to do. The owner
-- itself may ask again: the answer to its first claim can get lost.
-- Returns {'run', attempt, prompt, log, remaining ms, fields...} | {'gone'} | {'final'} | {'taken'} | {'moved'} | {'cancelled'}.
local id, worker = ARGV[1], ARGV[2]
local key = request_key(id)
local r = redis.call('HMGET', key, 'state', 'queue', 'released_ms', 'priority', 'cancel', 'deadline_ms',
  'owner', 'lane', 'node')
if not r[1] then return {'gone'} end
local is_again = r[1] == 'running' and r[7] == worker
if r[1] == 'running' and not is_again then return {'taken'} end
if r[1] ~= 'queued' and not is_again then return {'final'} end
local is_served = is_again
for i = 4, #ARGV do if ARGV[i] == r[2] then is_served = true end end
if not is_served then return {'moved'} end
if r[5] then
  finalize_and_tell(id, 'cancelled', ARGV[3])
  return {'cancelled'}
end

-- For those who ask where the time went: the first claim, the first after a hand-over, and by whom.
local function note_claim(key, worker, now)
  local r = redis.call('HMGET', key, 'handed_ms', 'workers')
  redis.call('HSETNX', key, r[1] and 'resumed_ms' or 'claimed_ms', now)
  local workers = r[2] or ''
  if #workers < 1000 then redis.call('HSET', key, 'workers', workers .. worker .. ' ') end
end

local lane = r[8] or r[4]
local now = now_ms()
if not is_again then
  local frontier = 'frontier:' .. r[2] .. ':' .. lane
  if r[3] and tonumber(redis.call('GET', frontier) or 0) < tonumber(r[3]) then
    redis.call('SET', frontier, r[3], 'EX', 86400)
  end
  leave_lines(id)
  redis.call('HSET', key, 'state', 'running', 'owner', worker, 'node', worker, 'started_ms', now, 'begun', 1,
    'came_from', r[9] or '')
  redis.call('SADD', 'running:' .. worker, id)
  note_claim(key, worker, now)
  redis.call('ZADD', 'deadlines', due_ms(id, now, false), id)
end
local f = redis.call('HMGET', key, 'attempt', 'prompt', 'sampling', 'tenant', 'salt', 'num_logprobs', 'tail',
  'came_from')
local log = redis.call('GET', tokens_key(id)) or ''
return {'run', f[1], f[2], log, tonumber(r[6]) - now, f[3], lane, f[4], f[5], f[6], f[7] or '', f[8] or ''}
