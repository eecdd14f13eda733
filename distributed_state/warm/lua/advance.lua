--[[
  Note how far a group of consumers is in a partition, if that is still this member's to handle, or nobody has noted
  anything since: a member that took too long, and lost its share, is done with its event.
  KEYS  owner  position
  ARGV  member, position
        before    the position as this member noted it last, '' = only if it is the member's
  Returns {'ok'} | {'lost'}
]]
local owner, position = KEYS[1], KEYS[2]
local member, reached, before = ARGV[1], ARGV[2], ARGV[3]
if redis.call('GET', owner) ~= member and (before == '' or redis.call('GET', position) ~= before) then return {'lost'} end
-- First what takes no memory, so that a full Redis lets the rest be done: else all since would be handled again.
redis.call('PERSIST', position)
redis.call('SET', position, reached)
return {'ok'}
