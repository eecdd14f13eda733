--[[
  Keep a lock, if it is still ours, under the same data id.
  KEYS  lock  meta
  ARGV  data_id (of the connection: see port/identities.py), lock_value, ttl_ms
  Returns {'ok'} | {'lost'} | {'uninitialised'}
]]
local lock, meta = KEYS[1], KEYS[2]
local data_id, lock_value, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
if redis.call('GET', lock) ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then return {'lost'} end
redis.call('PEXPIRE', lock, ttl_ms)
return {'ok'}
