--[[
  Take or keep a right that one member of a team has at a time, as to archive a partition.
  KEYS  claim
  ARGV  member, ttl_ms
  Returns {'ok'} | {'taken', member}
]]
local claim = KEYS[1]
local member, ttl_ms = ARGV[1], ARGV[2]
local holder = redis.call('GET', claim)
if holder and holder ~= member then return {'taken', holder} end
-- A full Redis lets a script go on whose first write takes no memory. Without claims nothing would be archived, and it
-- would stay full; they are few, and run out.
redis.call('DEL', claim)
redis.call('SET', claim, member, 'PX', ttl_ms)
return {'ok'}
