--[[
  Restore a partition's set of due records from SQL, after Redis was emptied: see due.lua.
  KEYS  due  meta
  ARGV  epoch
        whole   '1' = these are the last ones: the set is then noted as complete
        field   of the meta that has the epoch for which the set was filled
        then score, member, ...
  Returns {'ok'} | {'epoch'} | {'filled'} by somebody else
]]
local due, meta = KEYS[1], KEYS[2]
local epoch, whole, field = ARGV[1], ARGV[2], ARGV[3]
local place = redis.call('HMGET', meta, 'epoch', field)
if place[1] ~= epoch then return {'epoch'} end
if place[2] == epoch then return {'filled'} end
if ARGV[4] and field == 'lifetimes' then
  -- NX: a time that was written meanwhile is the right one.
  redis.call('ZADD', due, 'NX', unpack(ARGV, 4))
elseif ARGV[4] then
  -- LT: an older copy of the data may say later. A session that is found too early is put back.
  redis.call('ZADD', due, 'LT', unpack(ARGV, 4))
end
if whole == '1' then redis.call('HSET', meta, field, epoch) end
return {'ok'}
