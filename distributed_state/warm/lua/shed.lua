--[[
  Drop the oldest events of a partition, this one and all before it, and note up to where.
  KEYS  meta  events
  ARGV  epoch, offset
  Returns {'ok'} | {'epoch'}
]]
local meta, events = KEYS[1], KEYS[2]
local epoch, offset = ARGV[1], ARGV[2]
local place = redis.call('HMGET', meta, 'epoch', 'event_floor')
if place[1] ~= epoch then return {'epoch'} end
if tonumber(offset) > tonumber(place[2] or '0') then
  redis.call('XTRIM', events, 'MINID', string.format('%d', offset + 1) .. '-0')
  local now = redis.call('TIME')
  -- When some were dropped: see emit.lua.
  redis.call('HSET', meta, 'event_floor', offset, 'event_floor_ms', string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000)))
end
return {'ok'}
