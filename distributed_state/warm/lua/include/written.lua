--[[
  How far the journal of a partition is written and archived. All of this is in one field, because parsing it costs less than
  reading six fields.
  Expects  data_id (of the connection), written (meta's field 'journal')
  Defines  current          the epoch, nil if the partition holds none, or has another data id
           offset, bytes    of the last entry, as texts
           archived_offset, archived_bytes    of the last one that is archived, as texts
           proved           when the server was last asked whether it has this data id: see same_data
]]
written = written or ''
local current, offset, bytes, archived_offset, archived_bytes, kept_data_id, proved =
  string.match(written, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
if kept_data_id ~= data_id then current = nil end
