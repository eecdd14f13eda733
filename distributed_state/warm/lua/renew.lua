--[[
  Keep a lock, if it is still ours, and of this life of the data.
  KEYS  lock  meta
  ARGV  life (of the connection: see port/lives.py), lock_value, ttl_ms
  Returns {'ok'} | {'lost'} | {'uninitialised'}
]]
local lock, meta = KEYS[1], KEYS[2]
local life, lock_value, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
if redis.call('GET', lock) ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then return {'lost'} end
redis.call('PEXPIRE', lock, ttl_ms)
return {'ok'}
