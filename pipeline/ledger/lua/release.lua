-- Releases what there is room for. Returns the messages to send, (id, queue, lane, ...).
local out = {}
release_all(out)
return out
