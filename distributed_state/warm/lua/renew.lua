--[[
  Keep a lock, if it is still ours.
  KEYS  lock
  ARGV  grip, ttl_ms
  Returns {'ok'} | {'lost'}
]]
local lock = KEYS[1]
local grip, ttl_ms = ARGV[1], ARGV[2]
if redis.call('GET', lock) ~= grip then return {'lost'} end
redis.call('PEXPIRE', lock, ttl_ms)
return {'ok'}
