-- ARGV: n, then queues. Who goes next on them, as far as that is known: released requests, then held ones,
-- n at most. Changes nothing.
-- Returns (id, prompt, sampling, salt), one after the other.
local wanted, found, out = tonumber(ARGV[1]), 0, {}

local function add(id)
  if not id or found >= wanted then return end
  local r = redis.call('HMGET', request_key(id), 'state', 'prompt', 'sampling', 'salt')
  if r[1] ~= 'queued' or not r[2] then return end
  found = found + 1
  out[#out + 1], out[#out + 2], out[#out + 3], out[#out + 4] = id, r[2], r[3], r[4] or ''
end

for i = 2, #ARGV do
  local queue = ARGV[i]
  for _, lane in ipairs(LANES) do
    for _, id in ipairs(redis.call('ZRANGE', of_lane('released', queue, lane), 0, wanted - 1)) do add(id) end
  end
  for _, class in ipairs(classes(queue, now_ms())) do
    local lane = LANES[class[1]]
    local tenants = redis.call('ZRANGE', of_lane('lines', queue, lane), 0, wanted - 1)
    for depth = 0, wanted - 1 do
      for _, tenant in ipairs(tenants) do
        add(redis.call('ZRANGE', line_key(queue, lane, tenant), depth, depth)[1])
      end
    end
  end
end
return out
