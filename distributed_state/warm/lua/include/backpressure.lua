--[[
  Refuse, if too much of the partition is not archived yet.
  Expects  clock, journal_entries, journal_bytes, place (epoch, offset, bytes, archived_offset, archived_bytes of meta)
  Returns  {'backpressure', entries, bytes}, or goes on
  Defines  offset, bytes    of the last entry, as numbers
]]
local offset, bytes = place[2] + 0, place[3] + 0
local unarchived, unarchived_bytes = offset - place[4], bytes - place[5]
if unarchived >= journal_entries + 0 or unarchived_bytes >= journal_bytes + 0 then
  return {'backpressure', whole(unarchived), whole(unarchived_bytes)}
end
