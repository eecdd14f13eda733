--[[
  Drop the events of a partition up to this offset, and note it.
  KEYS  meta  events
  ARGV  epoch, offset
  Returns {'ok'} | {'epoch'}
]]
local meta, events = KEYS[1], KEYS[2]
local epoch, offset = ARGV[1], ARGV[2]
local place = redis.call('HMGET', meta, 'epoch', 'event_floor')
if place[1] ~= epoch then return {'epoch'} end
if tonumber(offset) > tonumber(place[2] or '0') then
  -- @include clock
  redis.call('XTRIM', events, 'MINID', format('%d', offset + 1) .. '-0')
  -- The time at which events were dropped: see emit.lua.
  redis.call('HSET', meta, 'event_floor', offset, 'event_floor_ms', format('%d', now_ms))
end
return {'ok'}
