--[[
  Write a lifecycle event without a commit: into the stream, and into the journal so that it is archived.
  KEYS  journal  meta  events  events_channel  roll
        roll only with a member
  ARGV  data_id             of the connection: see port/identities.py
        replica, sequence   the event's id
        since               ms of the server's clock: the event was not written before that time
        event_type, subject, actor, data
        publish_bytes       data up to this size is published whole
        journal_entries, journal_bytes     limits
        kept_events         how many events stay in the stream
        member              '' = always; else only if this member of the roll is due, which is then removed
  Returns {'ok', epoch, offset, time_ms, journal_offset, archived_offset}
          the last two, of the journal, are missing if it was written before
        | {'uninitialised'} | {'early'} | {'backpressure', entries, bytes}
        | {'unsure', ms, epoch}   if it was written, it is no longer in the stream, and only SQL knows; the server's clock
]]
local journal, meta, events, events_channel, roll = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local data_id, replica, sequence, since, event_type, subject, actor, data, publish_bytes, journal_entries, journal_bytes,
  kept_events, member = unpack(ARGV)
since, publish_bytes, journal_entries = since + 0, publish_bytes + 0, journal_entries + 0
journal_bytes, kept_events = journal_bytes + 0, kept_events + 0
local call = redis.call

local op = replica .. '.' .. sequence
local id = op .. '.0'
-- @include clock
local written, event, event_ms, floor_ms, interests =
  unpack(call('HMGET', meta, 'journal', 'event', 'event_ms', 'event_floor_ms', 'interests'))
-- @include written
-- @include same_data
-- @include journal_end
local epoch = current
if not epoch then return {'uninitialised'} end
-- Was the event written already? Then it is among the events after `since`, which are few unless the call was delayed,
-- and at most kept_events. If some were dropped meanwhile, or the partition was started again, the stream lacks some of
-- them. Usually even the newest event is older, and the stream is not read, which would cost as much as writing.
floor_ms = (floor_ms or 0) + 0
local seen = event_ms and since > event_ms + 0 and since > floor_ms
local from, count = '+', 1
while from and not seen do
  local page = call('XREVRANGE', events, from, '-', 'COUNT', count)
  for _, entry in ipairs(page) do
    local head = entry[2][2]
    -- @include entry_time
    if string.sub(head, 1, #id + 1) == id .. '\n' then
      return {'ok', epoch, string.match(entry[1], '^%d+'), format('%d', written_ms)}
    end
    seen = seen or written_ms < since
  end
  from, count = page[count] and '(' .. page[count][1], 16
end
if not seen and since <= floor_ms then return {'unsure', format('%d', now_ms), epoch} end
if member ~= '' then
  local due = call('ZSCORE', roll, member)
  if not due or tonumber(due) > now[1] * 1000 + now[2] / 1000 then return {'early'} end
end
-- @include backpressure

-- All checks have passed; only writes follow.
if member ~= '' then call('ZREM', roll, member) end
local types, payloads, version = {event_type}, {data}, '0'
event = (event or 0) + 0
local last_event = format('%d', event + 1)
-- @include events
local name = last_event .. ' ' .. event_type .. ' ' .. subject
data = 'e' .. #name .. ':' .. #data .. ':' .. name .. data -- an operation, as in commit.lua
-- No record, version 0: the archiver takes the event only.
local entry_id, text, kind, token_held, last_message = op .. '.emit', '', 'emit', '0', '0'
-- @include journal
return {'ok', epoch, last_event, format('%d', now_ms), offset, archived_offset}
