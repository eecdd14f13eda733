--[[
  Take records out of Redis that are archived in another form, or not at all: SQL knows better. Only whoever recovers
  the partition may.
  KEYS  mint  meta  then a record and its hydration token each
  ARGV  life    of the connection: see port/lives.py
        token   of the right to mint
        seen    the epoch of the partition before, '' = none
  Returns {'ok', records that were there} | {'lost'}
]]
local mint, meta = KEYS[1], KEYS[2]
local token, seen = ARGV[2], ARGV[3]
if redis.call('GET', mint) ~= token or (redis.call('HGET', meta, 'epoch') or '') ~= seen then return {'lost'} end
return {'ok', redis.call('DEL', unpack(KEYS, 3))}
