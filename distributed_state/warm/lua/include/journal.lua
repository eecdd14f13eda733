--[[
  An entry at the end of a partition's journal, and the partition's counts with it.
  Expects  clock, call (redis.call), journal, meta
           offset, bytes    of the last entry, as numbers
           entry_id, text, version, kind, actor, token_held, last_message, data; text '' and version '0' = no record
  Defines  offset, bytes    of this one, as texts
]]
offset, bytes = whole(offset + 1), whole(bytes + #data + #text + 128)
call('HSET', meta, 'offset', offset, 'bytes', bytes)
-- The head is one value, lines as in warm._entry: a stream entry of many fields costs more than the rest of the write.
call('XADD', journal, offset .. '-0', 'h', entry_id .. '\n' .. text .. '\n' .. version .. '\n' .. now[1] .. ' ' .. now[2]
  .. '\n' .. kind .. '\n' .. actor .. '\n' .. token_held .. '\n' .. bytes .. '\n' .. last_message, 'd', data)
