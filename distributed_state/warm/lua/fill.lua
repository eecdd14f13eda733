--[[
  Restore the set of check times for the lifetimes of archived records, after Redis was emptied.
  KEYS  lifetimes  meta
  ARGV  epoch
        whole   '1' = these are the last ones: the set is then noted as complete
        then score, member, ...
  Returns {'ok'} | {'epoch'}
]]
local lifetimes, meta = KEYS[1], KEYS[2]
local epoch, whole = ARGV[1], ARGV[2]
if redis.call('HGET', meta, 'epoch') ~= epoch then return {'epoch'} end
-- NX: a time that was written meanwhile is the right one.
if ARGV[3] then redis.call('ZADD', lifetimes, 'NX', unpack(ARGV, 3)) end
if whole == '1' then redis.call('HSET', meta, 'lifetimes', epoch) end
return {'ok'}
