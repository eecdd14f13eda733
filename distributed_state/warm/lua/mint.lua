--[[
  Ask to start a partition that holds no epoch, or one of another life of the data. Only one asks at a time. From here on
  nobody writes there, not even on a connection that was made before the life changed.
  KEYS  meta
  ARGV  life    of the connection: see port/lives.py; '' = of a replica
        token       ends in '@' and the life in which the right was first asked for
        token_ms
        over    an epoch that is to end, though it is of this life; '' = none
        held    '1' = the right is held already, and only kept for longer
  Returns {'live', epoch} | {'busy'} | {'ok', epoch before | ''}
]]
local meta = KEYS[1]
local life, token, token_ms, over, held = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local call = redis.call
-- @include epoch
if current and current ~= over then return {'live', current} end
-- A connection that was made to a replica knows no life that could be noted: another one is made. And a right that was
-- given in another life is not valid in this one, which may have older data than its holder has read.
if life == '' or string.sub(token, -#life - 1) ~= '@' .. life then return {'busy'} end
-- @include clock
-- `mint` is '<token> <until_ms>', a field of what never expires: a full Redis evicts a key that expires at once.
local kept = call('HMGET', meta, 'epoch', 'journal', 'mint')
local holder, until_ms = string.match(kept[3] or '', '^(%S+) (%d+)$')
-- A renewal never grants the right anew: a server that lost it (FLUSHALL) has lost the data that its holder has read.
if held == '1' and holder ~= token then return {'busy'} end
-- Asked again because the answer was lost, it is given again.
if holder and holder ~= token and until_ms + 0 > now_ms then return {'busy'} end
-- First what takes no memory, so that a full Redis lets the rest be done: what cannot be started cannot be read.
call('PERSIST', meta)
call('HSET', meta, 'mint', token .. ' ' .. format('%d', now_ms + token_ms))
if kept[1] then call('HSET', meta, 'life', '?', 'journal', string.match(kept[2], '^%S+ %S+ %S+ %S+ %S+ ') .. '? 0') end
return {'ok', kept[1] or ''}
