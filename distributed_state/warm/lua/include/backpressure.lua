--[[
  Refuse, if too much of the partition is not archived yet.
  Expects  clock, written, journal_entries, journal_bytes
  Returns  {'backpressure', entries, bytes}, or goes on
]]
local unarchived, unarchived_bytes = offset - archived_offset, bytes - archived_bytes
if unarchived >= journal_entries + 0 or unarchived_bytes >= journal_bytes + 0 then
  return {'backpressure', format('%d', unarchived), format('%d', unarchived_bytes)}
end
