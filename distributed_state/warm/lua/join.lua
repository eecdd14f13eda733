--[[
  Be a member of a team for a while, and learn how many there are.
  KEYS  team
  ARGV  member, ttl_ms
  Returns {'ok', members}
]]
local team = KEYS[1]
local member, ttl_ms = ARGV[1], ARGV[2]
-- The server's time: whoever went by a clock that is wrong would not see the others, or not be seen.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
-- First, because it takes no memory: then even a full Redis lets the rest be done.
redis.call('ZREMRANGEBYSCORE', team, '-inf', string.format('%.6f', now))
redis.call('ZADD', team, string.format('%.6f', now + ttl_ms / 1000), member)
return {'ok', redis.call('ZCARD', team)}
