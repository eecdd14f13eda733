--[[
  Take a record out of Redis that is archived whole, which its TTL says, as running out of memory would; the next read
  brings it back.
  KEYS  record  hydration  channel
  ARGV  told    what is published: a change after the present one, so that it is a gap
  Returns {'ok'} | {'kept'}
]]
local record, hydration, channel = KEYS[1], KEYS[2], KEYS[3]
local told = ARGV[1]
if redis.call('PTTL', record) == -1 then return {'kept'} end
-- The token too: whoever read SQL before must not bring back what he read.
redis.call('DEL', record, hydration)
redis.call('SPUBLISH', channel, told)
return {'ok'}
