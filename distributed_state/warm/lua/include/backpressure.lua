--[[
  Refuse the write if too much of the partition is not archived yet.
  Expects  clock, written; journal_entries, journal_bytes (numbers)
  Returns  {'backpressure', entries, bytes}, or goes on
  Defines  offset, bytes    as numbers
]]
offset, bytes = offset + 0, bytes + 0
local unarchived, unarchived_bytes = offset - archived_offset, bytes - archived_bytes
if unarchived >= journal_entries or unarchived_bytes >= journal_bytes then
  return {'backpressure', format('%d', unarchived), format('%d', unarchived_bytes)}
end
