--[[
  Note that the data of a partition has another id now, although nothing was lost.
  KEYS  meta
  ARGV  data_id      of the connection: see port/identities.py; '' = of a replica
        epoch, from  the epoch and the data id of the partition, as they were seen
  Returns {'ok'} | {'other'}
]]
local meta = KEYS[1]
local data_id, epoch, from = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
local kept = redis.call('HMGET', meta, 'epoch', 'life', 'journal', 'mint')
if data_id == '' or kept[1] ~= epoch or kept[2] ~= from or not kept[3] then return {'other'} end
-- A worker is starting the partition; writes must be refused until it has finished.
if kept[4] and string.match(kept[4], '%d+$') + 0 > now_ms then return {'other'} end
redis.call('HSET', meta, 'life', data_id, 'journal', string.match(kept[3], '^%S+ %S+ %S+ %S+ %S+ ') .. data_id .. ' 0')
return {'ok'}
