--[[
  Take a record out of Redis: SQL knows better how it is. Only whoever recovers the partition may.
  KEYS  meta  record  hydration  items
  ARGV  life    of the connection: see port/lives.py
        token   of the right to mint
        seen    the epoch of the partition before, '' = none
  Returns {'ok'} | {'lost'}
]]
local meta, record, hydration, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local life, token, seen = ARGV[1], ARGV[2], ARGV[3]
-- @include mint_right
if not may then return {'lost'} end
redis.call('DEL', record, hydration, items)
return {'ok'}
