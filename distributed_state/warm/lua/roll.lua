--[[
  The live replicas, and when each counts as lost.
  KEYS  roll
  ARGV  none
  Returns {'ok', now_ms, {id, due_ms, ...}}
]]
local roll = KEYS[1]
-- @include clock
local at = format('%d', now_ms)
return {'ok', at, redis.call('ZRANGEBYSCORE', roll, '(' .. at, '+inf', 'WITHSCORES')}
