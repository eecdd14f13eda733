--[[
  Join a team for a while, and count its members.
  KEYS  team
  ARGV  member, ttl_ms
  Returns {'ok', members}
]]
local team = KEYS[1]
local member, ttl_ms = ARGV[1], ARGV[2]
-- The server's time: a member with a wrong clock would not see the others, or would not be seen.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
-- After a first write that takes no memory even a full Redis accepts the rest.
redis.call('ZREMRANGEBYSCORE', team, '-inf', string.format('%.6f', now))
redis.call('ZADD', team, string.format('%.6f', now + ttl_ms / 1000), member)
return {'ok', redis.call('ZCARD', team)}
