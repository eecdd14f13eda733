--[[
  Keep a lock, if it is still ours.
  KEYS  lock
  ARGV  lock_value, ttl_ms
  Returns {'ok'} | {'lost'}
]]
local lock = KEYS[1]
local lock_value, ttl_ms = ARGV[1], ARGV[2]
if redis.call('GET', lock) ~= lock_value then return {'lost'} end
redis.call('PEXPIRE', lock, ttl_ms)
return {'ok'}
