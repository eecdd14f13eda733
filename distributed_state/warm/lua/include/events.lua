--[[
  Lifecycle events: into the stream and to who listens, and the oldest out of the stream.
  Expects  clock, call (redis.call), events, events_channel, meta, epoch, actor, publish_bytes, kept_events
           op            what their ids begin with
           event         the number of the last one so far
           types, payloads   of the new ones, at least one; payloads: their data
           subject       whom they are about
           version       of the record that was changed, '0' = none
  Defines  event         the number of the last one now
]]
for i, type in ipairs(types) do
  local number = format('%d', event + i)
  local head = op .. '.' .. format('%d', i - 1) .. '\n' .. type .. '\n' .. subject .. '\n' .. now[1] .. ' ' .. now[2]
    .. '\n' .. version .. '\n' .. actor
  call('XADD', events, number .. '-0', 'h', head, 'd', payloads[i])
  local small = #payloads[i] <= publish_bytes
  call('SPUBLISH', events_channel, epoch .. ' ' .. number .. (small and '\n' .. head .. '\n' .. payloads[i] or ''))
end
event = event + #types
call('HSET', meta, 'event', format('%d', event))
-- In steps, because a stream is trimmed cheaply by whole blocks only; exact, so that the floor is known.
local floor = event - kept_events
if floor > 0 and event % 64 < #types then
  call('XTRIM', events, 'MINID', format('%d', floor + 1) .. '-0')
  -- It may be higher already: old events are dropped by their age, too.
  if floor > tonumber(call('HGET', meta, 'event_floor') or '0') then call('HSET', meta, 'event_floor', format('%d', floor)) end
  call('HSET', meta, 'event_floor_ms', format('%d', now_ms)) -- when some were dropped
end
