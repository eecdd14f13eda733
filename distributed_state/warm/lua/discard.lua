--[[
  Remove a record from Redis because SQL has a later state of it. Only the worker that recovers the partition may do this.
  KEYS  meta  record  hydration  items
  ARGV  data_id of the connection: see port/identities.py
        token   of the right to mint
        seen    the partition's previous epoch, '' = none
  Returns {'ok'} | {'lost'}
]]
local meta, record, hydration, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local data_id, token, seen = ARGV[1], ARGV[2], ARGV[3]
-- @include mint_right
if not may then return {'lost'} end
redis.call('DEL', record, hydration, items)
return {'ok'}
