--[[
  The epoch of a partition, for scripts that read nothing else of its journal.
  Expects  meta, data_id (of the connection)
  Defines  current    the epoch, nil if the partition holds none, or has another data id
           written, proved    for same_data, which all use but those that start a partition
]]
local written = redis.call('HGET', meta, 'journal') or ''
local current, kept_data_id, proved = string.match(written, '^(%S+) %S+ %S+ %S+ %S+ (%S+) (%S+)$')
if kept_data_id ~= data_id then current = nil end
