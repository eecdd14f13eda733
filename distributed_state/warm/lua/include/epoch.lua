--[[
  The epoch of a partition, where nothing else of its journal is asked for.
  Expects  meta, life (of the connection)
  Defines  current    the epoch, nil if the partition holds none, or is of another life of the data
           proved     for same_data, which all use but those that start a partition
]]
local current, current_life, proved = unpack(redis.call('HMGET', meta, 'epoch', 'life', 'proved'))
if current_life ~= life then current = nil end
