-- Keeps the log-probabilities of a prompt until the request's deadline and retention are over.
-- ARGV: id, worker, attempt, bytes, retention s.
-- Returns 1, or 0 if this attempt is stale. Written again, it says the same.
local id = ARGV[1]
local r = redis.call('HMGET', request_key(id), 'owner', 'attempt', 'deadline_ms')
if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] then return 0 end
local left_s = math.max(0, math.ceil((tonumber(r[3]) - now_ms()) / 1000))
redis.call('SET', 'prompt_logprobs:' .. id, ARGV[4], 'EX', left_s + tonumber(ARGV[5]))
return 1
