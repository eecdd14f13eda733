--[[
  Append lifecycle events to the stream, publish them, and trim the stream.
  Expects  clock, call (redis.call), events, events_channel, meta, epoch, actor, publish_bytes, kept_events
           op            the beginning of their ids
           event         the number of the last one so far
           last_event    that of the last one of these, as text
           interests     meta's field of that name: see interest.lua
           types, payloads   of the new ones, at least one; payloads: their data
           subject       the id that they are about
           version       of the record that was changed, '0' = none
  Defines  event         the number of the last one now, which is noted with the journal's entry
]]
for i, type in ipairs(types) do
  -- Usually there is one event, and formatting a number costs as much as two fields.
  local number = i == #types and last_event or format('%d', event + i)
  local place = epoch .. ' ' .. number
  local head = op .. '.' .. (i == 1 and '0' or i - 1) .. '\n' .. type .. '\n' .. subject
    .. '\n' .. now[1] .. ' ' .. now[2] .. '\n' .. version .. '\n' .. actor
  call('XADD', events, number .. '-0', 'h', head, 'd', payloads[i])
  local body = #payloads[i] <= publish_bytes and '\n' .. head .. '\n' .. payloads[i] or ''
  -- A subscriber to some types receives the offset of the previous event of these types.
  local asked = ''
  if interests then
    local exact, family = ',' .. type .. ',', ',' .. string.match(type, '^[^.]*') .. '.*,'
    interests = string.gsub(interests, '(%S+)@(%d+)', function(types_of, before)
      local list = ',' .. types_of .. ','
      if not (string.find(list, exact, 1, true) or string.find(list, family, 1, true)) then return end
      asked = asked .. types_of .. '@' .. before .. ' '
      return types_of .. '@' .. number
    end)
    if asked ~= '' then call('HSET', meta, 'interests', interests) end
  end
  call('SPUBLISH', events_channel, place .. body)
  for types_of, before in string.gmatch(asked, '(%S+)@(%d+)') do
    call('SPUBLISH', events_channel .. ':' .. types_of, place .. ' ' .. before .. body)
  end
end
event = event + #types
-- In steps, because a stream is trimmed cheaply by whole blocks only; exact, so that the floor is known.
local floor = event - kept_events
if floor > 0 and event % 64 < #types then
  call('XTRIM', events, 'MINID', format('%d', floor + 1) .. '-0')
  -- The floor may be higher already, because old events are also dropped by age.
  if floor > tonumber(call('HGET', meta, 'event_floor') or '0') then call('HSET', meta, 'event_floor', format('%d', floor)) end
  call('HSET', meta, 'event_floor_ms', format('%d', now_ms)) -- when events were dropped
end
