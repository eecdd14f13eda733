--[[
  Mark access tokens as revoked for a while, for workers that cannot read SQL.
  KEYS  revoked
  ARGV  kept_ms   marks are dropped after this time
        id, ...
  Returns {'ok'}
]]
local revoked = KEYS[1]
local kept_ms = ARGV[1]
-- @include clock
-- After a first write that takes no memory even a full Redis accepts the rest.
redis.call('ZREMRANGEBYSCORE', revoked, '-inf', format('%d', now_ms - kept_ms))
for at = 2, #ARGV do redis.call('ZADD', revoked, format('%d', now_ms), ARGV[at]) end
return {'ok'}
