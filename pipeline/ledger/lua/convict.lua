-- Decides who is charged for the loss of a worker, before its requests are queued again. ARGV: worker.
-- It is proven who killed it if one request was alone on it, or was the only one on trial there, or the
-- only one that was on a lost worker before. Then only that one is charged, and those who were charged
-- with it for its earlier crashes are not any more. Without a proof everybody is charged.
-- Asked again, the verdict stands. Returns the id that is proven guilty, or false. A worker that has a lease
-- again is not lost.
local worker = ARGV[1]
if redis.call('EXISTS', 'lease:' .. worker) == 1 then return false end
local verdict = 'crash:' .. worker
local members = redis.call('SMEMBERS', 'running:' .. worker)
if #members == 0 or redis.call('EXISTS', verdict) == 1 then return false end
local function only_one_with(field)
  local found = {}
  for _, id in ipairs(members) do
    if redis.call('HEXISTS', request_key(id), field) == 1 then found[#found + 1] = id end
  end
  return #found == 1 and found[1]
end
local guilty = (#members == 1 and members[1]) or only_one_with('trial') or only_one_with('crashed')
for _, id in ipairs(members) do
  redis.call('HSET', verdict, id, (not guilty or guilty == id) and 1 or 0)
end
redis.call('EXPIRE', verdict, 86400)
if not guilty then return false end
for earlier in string.gmatch(redis.call('HGET', request_key(guilty), 'crashed') or '', '%S+') do
  local charges = redis.call('HGETALL', 'crash:' .. earlier)
  for i = 1, #charges, 2 do
    local key = request_key(charges[i])
    if charges[i] ~= guilty and charges[i + 1] == '1'
        and tonumber(redis.call('HGET', key, 'losses') or 0) > 0 then
      redis.call('HINCRBY', key, 'losses', -1)
      redis.call('HSET', 'crash:' .. earlier, charges[i], 0)
    end
  end
end
return guilty
