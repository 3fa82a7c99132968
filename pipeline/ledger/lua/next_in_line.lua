-- ARGV: n, number of known ids, these, then queues. Who goes next on them, as far as that is known: released
-- requests, then held ones, n at most. Changes nothing.
-- Returns (id, prompt, sampling, salt), one after the other; the prompt of a known one is ''.
local wanted, num_known, found, out = tonumber(ARGV[1]), tonumber(ARGV[2]), 0, {}
local is_known = {}
for i = 3, 2 + num_known do is_known[ARGV[i]] = true end

local function add(id)
  if not id or found >= wanted then return end
  local r = redis.call('HMGET', request_key(id), 'state', 'sampling', 'salt', is_known[id] and 'state' or 'prompt')
  if r[1] ~= 'queued' or not r[4] then return end
  local prompt = is_known[id] and '' or r[4]
  found = found + 1
  out[#out + 1], out[#out + 2], out[#out + 3], out[#out + 4] = id, prompt, r[2], r[3] or ''
end

for i = 3 + num_known, #ARGV do
  local queue = ARGV[i]
  for _, lane in ipairs(LANES) do
    for _, id in ipairs(redis.call('ZRANGE', of_lane('released', queue, lane), 0, wanted - 1)) do add(id) end
    if found >= wanted then return out end
  end
  for _, class in ipairs(classes(queue, now_ms())) do
    local lane = LANES[class[1]]
    local tenants = redis.call('ZRANGE', of_lane('lines', queue, lane), 0, wanted - 1)
    for depth = 0, wanted - 1 do
      for _, tenant in ipairs(tenants) do
        if found >= wanted then return out end
        add(redis.call('ZRANGE', line_key(queue, lane, tenant), depth, depth)[1])
      end
    end
  end
end
return out
