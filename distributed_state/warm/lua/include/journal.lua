--[[
  An entry at the end of a partition's journal, and the partition's counts with it.
  Expects  clock, data_id, written and same_data (offset and bytes may be numbers by now), journal
           entry_id, text, version, kind, actor, token_held, last_message, data; text '' and version '0' = no record
           last_event    the number of the last event, if there are new ones, else nil; when that was is noted as well
  Defines  offset, bytes    of this one, as texts
]]
local alone = offset - archived_offset == 0
offset, bytes = format('%d', offset + 1), format('%d', bytes + #data + #text + 128)
local progress = current .. ' ' .. offset .. ' ' .. bytes .. ' ' .. archived_offset .. ' ' .. archived_bytes
  .. ' ' .. data_id .. ' ' .. proved
-- Written in one call, because a second one would cost more than all of this.
if last_event then
  call('HSET', meta, 'journal', progress, 'event', last_event, 'event_ms', format('%d', now_ms))
else
  call('HSET', meta, 'journal', progress)
end
-- The head is one value of lines, which JournalEntry.read parses. An entry of many fields costs more than the rest of the write.
call('XADD', journal, offset .. '-0', 'h', entry_id .. '\n' .. text .. '\n' .. version .. '\n' .. now[1] .. ' ' .. now[2]
  .. '\n' .. kind .. '\n' .. actor .. '\n' .. token_held .. '\n' .. bytes .. '\n' .. last_message, 'd', data)
-- The archiver seldom looks at a fully archived journal: the first entry wakes it, later ones need not.
if alone then call('SPUBLISH', journal, '') end
