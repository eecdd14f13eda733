--[[
  Take or keep a claim, for example to archive a partition, which only one member of a team has at a time.
  KEYS  claim
  ARGV  member, ttl_ms
  Returns {'ok'} | {'taken', member}
]]
local claim = KEYS[1]
local member, ttl_ms = ARGV[1], ARGV[2]
local holder = redis.call('GET', claim)
if holder and holder ~= member then return {'taken', holder} end
-- After a first write that takes no memory even a full Redis accepts the rest. Without claims nothing would be
-- archived, and Redis would stay full. Claims are few, and expire.
redis.call('DEL', claim)
redis.call('SET', claim, member, 'PX', ttl_ms)
return {'ok'}
