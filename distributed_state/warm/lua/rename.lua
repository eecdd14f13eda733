--[[
  Note that the life of a partition's data has another name: nothing was lost. Or that it is in doubt, so that nobody
  writes there until it is recovered.
  KEYS  meta
  ARGV  life         of the connection: see port/lives.py; '' = of a replica
        epoch, from  the epoch and the life of the partition, as they were seen
        doubt        '1' = note that it is in doubt
  Returns {'ok'} | {'other'}
]]
local meta = KEYS[1]
local life, epoch, from, doubt = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local kept = redis.call('HMGET', meta, 'epoch', 'life', 'journal')
if life == '' or kept[1] ~= epoch or kept[2] ~= from or not kept[3] then return {'other'} end
if doubt == '1' then life = '?' end
redis.call('HSET', meta, 'life', life, 'journal', string.match(kept[3], '^%S+ %S+ %S+ %S+ %S+ ') .. life)
return {'ok'}
