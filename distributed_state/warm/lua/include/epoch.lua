--[[
  The epoch of a partition, where nothing else of its journal is asked for.
  Expects  meta, life (of the connection)
  Defines  current    the epoch, nil if the partition holds none, or is of another life of the data
]]
local current, current_life = unpack(redis.call('HMGET', meta, 'epoch', 'life'))
if current_life ~= life then current = nil end
