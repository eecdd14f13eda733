--[[
  Refuse, if too much of the partition is not archived yet.
  Expects  clock, journal_entries, journal_bytes, place (epoch, offset, bytes, archived_offset, archived_bytes of meta)
  Returns  {'backpressure', entries, bytes}, or goes on
]]
local unarchived, unarchived_bytes = place[2] - place[4], place[3] - place[5]
if unarchived >= journal_entries or unarchived_bytes >= journal_bytes then
  return {'backpressure', whole(unarchived), whole(unarchived_bytes)}
end
