--[[
  Put back when to look at the lifetimes of archived records: Redis was emptied, and with it went the set of them.
  KEYS  lifetimes  meta
  ARGV  epoch
        whole   '1' = with these all are back, which is noted
        then score, member, ...
  Returns {'ok'} | {'epoch'}
]]
local lifetimes, meta = KEYS[1], KEYS[2]
local epoch, whole = ARGV[1], ARGV[2]
if redis.call('HGET', meta, 'epoch') ~= epoch then return {'epoch'} end
-- NX: what was written since knows better.
if ARGV[3] then redis.call('ZADD', lifetimes, 'NX', unpack(ARGV, 3)) end
if whole == '1' then redis.call('HSET', meta, 'lifetimes', epoch) end
return {'ok'}
