--[[
  Remove events from the stream of a partition. Readers skip the gaps; the offsets of other events do not change.
  KEYS  meta  events
  ARGV  epoch, then identities
  Returns {'ok'} | {'epoch'}
]]
local meta, events = KEYS[1], KEYS[2]
local epoch = ARGV[1]
if redis.call('HGET', meta, 'epoch') ~= epoch then return {'epoch'} end
redis.call('XDEL', events, unpack(ARGV, 2))
return {'ok'}
