--[[
  Note the name of a record that is brought into SQL past Redis, so that nobody takes it for new.
  KEYS  meta
  ARGV  life    of the connection: see port/lives.py
        epoch, text
  Returns {'ok'} | {'epoch'}
]]
local meta = KEYS[1]
local life, epoch, text = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include epoch
-- @include same_data
if current ~= epoch then return {'epoch'} end
local place, mark, listed, unheard, fresh
-- @include new_name
-- First what takes no memory, so that a full Redis lets the rest be done.
redis.call('PERSIST', meta)
if unheard then redis.call('HSET', meta, place, listed .. mark) end
return {'ok'}
