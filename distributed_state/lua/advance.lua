--[[
  Note how far a group of consumers is in a partition, if that is still this member's to handle.
  KEYS  owner  position
  ARGV  member, position
  Returns {'ok'} | {'lost'}
]]
local owner, position = KEYS[1], KEYS[2]
local member, reached = ARGV[1], ARGV[2]
if redis.call('GET', owner) ~= member then return {'lost'} end
redis.call('SET', position, reached)
return {'ok'}
