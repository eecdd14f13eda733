--[[
  Drop the events of a partition that are older than age_ms, and note the offset of the last one.
  KEYS  meta  events
  ARGV  age_ms
        most    how many at most in one call
  Returns {'ok', dropped}
]]
local meta, events = KEYS[1], KEYS[2]
local age_ms, most = tonumber(ARGV[1]), tonumber(ARGV[2])
-- @include clock

local before_ms = now[1] * 1000 + now[2] / 1000 - age_ms
local place = redis.call('HMGET', meta, 'event', 'event_floor')
local floor = tonumber(place[2] or '0')
-- Events are in the order of their times, so a binary search finds the first that is new enough. For a removed event
-- the next one counts, or else the previous one.
local low, high = floor, math.min(tonumber(place[1] or '0'), floor + most)
while low < high do
  local middle = math.ceil((low + high) / 2)
  local found = redis.call('XRANGE', events, format('%d', middle) .. '-0', '+', 'COUNT', 1)[1]
    or redis.call('XREVRANGE', events, format('%d', middle) .. '-0', '-', 'COUNT', 1)[1]
  local is_new = false
  if found then
    local head = found[2][2]
    -- @include entry_time
    is_new = written_ms >= before_ms
  end
  if is_new then high = middle - 1 else low = middle end
end
if low == floor then return {'ok', '0'} end
redis.call('XTRIM', events, 'MINID', format('%d', low + 1) .. '-0')
redis.call('HSET', meta, 'event_floor', format('%d', low), 'event_floor_ms', format('%d', now_ms))
return {'ok', format('%d', low - floor)}
