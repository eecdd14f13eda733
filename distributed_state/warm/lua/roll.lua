--[[
  The replicas that are there, and when each counts as lost.
  KEYS  roll
  ARGV  none
  Returns {'ok', now_ms, {id, due_ms, ...}}
]]
local roll = KEYS[1]
-- @include clock
return {'ok', whole(now_ms), redis.call('ZRANGEBYSCORE', roll, '(' .. whole(now_ms), '+inf', 'WITHSCORES')}
