--[[
  Note how far a group of consumers is in a partition, if that is still this replica's to handle.
  KEYS  owner  position
  ARGV  replica, position
  Returns {'ok'} | {'lost'}
]]
local owner, position = KEYS[1], KEYS[2]
local replica, reached = ARGV[1], ARGV[2]
if redis.call('GET', owner) ~= replica then return {'lost'} end
redis.call('SET', position, reached)
return {'ok'}
