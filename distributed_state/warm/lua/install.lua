--[[
  Start a partition under a new epoch, which SQL knows already. Offsets begin anew.
  KEYS  meta  mint  journal  events
  ARGV  token, epoch
  Returns {'ok'} | {'live', epoch} | {'lost'}
]]
local meta, mint, journal, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, epoch = ARGV[1], ARGV[2]
local current = redis.call('HGET', meta, 'epoch')
if current then return {'live', current} end
if redis.call('GET', mint) ~= token then return {'lost'} end
-- DEL first: after it even a full Redis lets the rest be done.
redis.call('DEL', mint, journal, events)
redis.call('HSET', meta, 'epoch', epoch, 'journal', epoch .. ' 0 0 0 0', 'token', '0', 'event', '0', 'event_floor', '0')
-- What was written before this is not here: see commit.lua and emit.lua.
-- @include clock
redis.call('HSET', meta, 'fresh', format('%d', now_ms), 'event_floor_ms', format('%d', now_ms))
return {'ok'}
