--[[
  Put an archived record back, if it was not changed after the token was left. The op ids of its earlier commits are only
  in SQL; those of later commits are noted here by commit.lua.
  KEYS  record  hydration  meta  items
  ARGV  data_id (of the connection: see port/identities.py), epoch, token, ttl_ms, then field, value, ...
  Returns {'ok', ms of the server's clock} | {'present'} | {'lost'} | {'epoch', epoch} | {'uninitialised'}
]]
local record, hydration, meta, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local data_id, epoch, token, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
if current ~= epoch then return {'epoch', current} end
if redis.call('EXISTS', record) == 1 then return {'present'} end
if redis.call('GET', hydration) ~= token then return {'lost'} end
-- Items that stayed longer than the record are deleted too: the record from SQL may be older.
redis.call('DEL', hydration, items)
for i = 5, #ARGV, 7000 do redis.call('HSET', record, unpack(ARGV, i, math.min(i + 6999, #ARGV))) end
redis.call('HSET', record, '#ops', '@' .. format('%d', now_ms) .. ';')
redis.call('PEXPIRE', record, ttl_ms)
return {'ok', format('%d', now_ms)}
