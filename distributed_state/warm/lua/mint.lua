--[[
  Ask for the right to start a partition that holds no epoch, or one with another data id. Only one caller has it at
  a time. From now on writes are refused, even on connections that were made before the data id changed.
  KEYS  meta
  ARGV  data_id     of the connection: see port/identities.py; '' = of a replica
        token       ends in '@' and the data id under which the right was first requested
        token_ms
        over        an epoch that is to end, even if it has this data id; '' = none
        held        '1' = the caller has the right already, and only extends it
  Returns {'live', epoch} | {'busy'} | {'ok', epoch before | ''}
]]
local meta = KEYS[1]
local data_id, token, token_ms, over, held = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local call = redis.call
-- @include epoch
if current and current ~= over then return {'live', current} end
-- A connection to a replica has no data id to note; the caller makes another connection. A right that was granted under
-- another data id is not valid under this one, which may have older data than the holder has read.
if data_id == '' or string.sub(token, -#data_id - 1) ~= '@' .. data_id then return {'busy'} end
-- @include clock
-- `mint` is '<token> <until_ms>', a field of a key without a TTL: a full Redis would evict a key with a TTL at once.
local kept = call('HMGET', meta, 'epoch', 'journal', 'mint')
local holder, until_ms = string.match(kept[3] or '', '^(%S+) (%d+)$')
-- An extension never grants the right again: a server that lost it (FLUSHALL) has lost the data that its holder has read.
if held == '1' and holder ~= token then return {'busy'} end
-- A holder whose answer was lost asks again, and gets the right again.
if holder and holder ~= token and until_ms + 0 > now_ms then return {'busy'} end
-- After a first write that takes no memory even a full Redis accepts the rest. A partition that cannot be started
-- cannot be read.
call('PERSIST', meta)
call('HSET', meta, 'mint', token .. ' ' .. format('%d', now_ms + token_ms))
if kept[1] then call('HSET', meta, 'life', '?', 'journal', string.match(kept[2], '^%S+ %S+ %S+ %S+ %S+ ') .. '? 0') end
return {'ok', kept[1] or ''}
