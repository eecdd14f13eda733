--[[
  Note that the life of a partition's data has another name now, although nothing was lost.
  KEYS  meta
  ARGV  life         of the connection: see port/lives.py; '' = of a replica
        epoch, from  the epoch and the life of the partition, as they were seen
  Returns {'ok'} | {'other'}
]]
local meta = KEYS[1]
local life, epoch, from = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
local kept = redis.call('HMGET', meta, 'epoch', 'life', 'journal', 'mint')
if life == '' or kept[1] ~= epoch or kept[2] ~= from or not kept[3] then return {'other'} end
-- A worker is starting the partition; writes must be refused until it has finished.
if kept[4] and string.match(kept[4], '%d+$') + 0 > now_ms then return {'other'} end
redis.call('HSET', meta, 'life', life, 'journal', string.match(kept[3], '^%S+ %S+ %S+ %S+ %S+ ') .. life .. ' 0')
return {'ok'}
