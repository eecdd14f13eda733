--[[
  Ask to start a partition that holds no epoch. Only one asks at a time.
  KEYS  meta  mint
  ARGV  token, token_ms
  Returns {'live', epoch} | {'busy'} | {'ok'}
]]
local meta, mint = KEYS[1], KEYS[2]
local token, token_ms = ARGV[1], ARGV[2]
local epoch = redis.call('HGET', meta, 'epoch')
if epoch then return {'live', epoch} end
-- First what takes no memory, so that a full Redis lets the rest be done: what cannot be started cannot be read.
redis.call('PERSIST', meta)
if redis.call('SET', mint, token, 'NX', 'PX', token_ms) then return {'ok'} end
return {'busy'}
