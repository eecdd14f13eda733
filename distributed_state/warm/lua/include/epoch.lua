--[[
  The epoch of a partition, for scripts that read nothing else of its journal.
  Expects  meta, life (of the connection)
  Defines  current    the epoch, nil if the partition holds none, or is of another life of the data
           written, proved    for same_data, which all use but those that start a partition
]]
local written = redis.call('HGET', meta, 'journal') or ''
local current, current_life, proved = string.match(written, '^(%S+) %S+ %S+ %S+ %S+ (%S+) (%S+)$')
if current_life ~= life then current = nil end
