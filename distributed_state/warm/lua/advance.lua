--[[
  Note the position of a group of consumers in a partition. A member that took too long may have lost the partition: it may
  still note its event if the position has not changed since.
  KEYS  owner  position
  ARGV  member, position
        before    the position that this member noted last, '' = note only if the partition is still the member's
  Returns {'ok'} | {'lost'}
]]
local owner, position = KEYS[1], KEYS[2]
local member, reached, before = ARGV[1], ARGV[2], ARGV[3]
if redis.call('GET', owner) ~= member and (before == '' or redis.call('GET', position) ~= before) then return {'lost'} end
-- After a first write that takes no memory even a full Redis accepts the rest. Otherwise later events would be handled
-- again.
redis.call('PERSIST', position)
redis.call('SET', position, reached)
return {'ok'}
