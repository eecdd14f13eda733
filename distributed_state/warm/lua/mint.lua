--[[
  Ask to start a partition that holds no epoch, or one of another life of the data. Only one asks at a time. From here on
  nobody writes there, not even on a connection that was made before the life changed.
  KEYS  meta  mint
  ARGV  life    of the connection: see port/lives.py; '' = of a replica
        token, token_ms
  Returns {'live', epoch} | {'busy'} | {'ok', epoch before | ''}
]]
local meta, mint = KEYS[1], KEYS[2]
local life, token, token_ms = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
-- @include epoch
if current then return {'live', current} end
-- A connection that was made to a replica knows no life that could be noted: another one is made.
if life == '' then return {'busy'} end
-- First what takes no memory, so that a full Redis lets the rest be done: what cannot be started cannot be read.
call('PERSIST', meta)
if not call('SET', mint, token, 'NX', 'PX', token_ms) then
  -- Asked again because the answer was lost, or to keep it for longer.
  if call('GET', mint) ~= token then return {'busy'} end
  call('PEXPIRE', mint, token_ms)
end
local kept = call('HMGET', meta, 'epoch', 'journal')
if kept[1] then call('HSET', meta, 'life', '?', 'journal', string.match(kept[2], '^%S+ %S+ %S+ %S+ %S+ ') .. '?') end
return {'ok', kept[1] or ''}
