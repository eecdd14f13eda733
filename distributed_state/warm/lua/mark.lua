--[[
  Write a journal entry that changes nothing, so that entries before it can be trimmed.
  KEYS  journal  meta
  ARGV  epoch, event
  Returns {'ok', offset} | {'epoch'}
]]
local journal, meta = KEYS[1], KEYS[2]
local epoch, event = ARGV[1], ARGV[2]
local place = redis.call('HMGET', meta, 'epoch', 'offset', 'bytes')
if place[1] ~= epoch then return {'epoch'} end
local now = redis.call('TIME')
local offset, bytes = string.format('%d', place[2] + 1), string.format('%d', place[3] + 128)
-- First what takes no memory, so that a full Redis lets the rest be done: it makes room.
redis.call('PERSIST', journal)
redis.call('HSET', meta, 'offset', offset, 'bytes', bytes)
-- No record, version 0: the archiver moves on and inserts nothing.
redis.call('XADD', journal, offset .. '-0', 'h', event .. '\n\n0\n' .. now[1] .. ' ' .. now[2] .. '\nmark\n\n0\n' .. bytes .. '\n0', 'd', '')
return {'ok', offset}
