--[[
  Keep a lock, if it is still ours, under the same data id.
  KEYS  lock  meta  stop
  ARGV  data_id (of the connection: see port/identities.py), lock_value, ttl_ms
  Returns {'ok'} | {'ok', reason}   the holder is asked to stop: see stop.lua
          | {'lost'} | {'uninitialised'}
]]
local lock, meta, stop = KEYS[1], KEYS[2], KEYS[3]
local data_id, lock_value, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
if redis.call('GET', lock) ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then return {'lost'} end
redis.call('PEXPIRE', lock, ttl_ms)
local asked = redis.call('GET', stop)
if asked and string.sub(asked, 1, #lock_value + 1) == lock_value .. '\n' then
  local reason = string.sub(asked, #lock_value + 2)
  if string.sub(reason, -1) ~= '\n' then return {'ok', reason} end
end
return {'ok'}
