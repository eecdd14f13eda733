--[[
  Take an archived tombstone out of Redis, unless the record started anew, and let replicas forget their copies of it.
  KEYS  record  hydration  channel
  ARGV  version
        told     what is published: a change after the tombstone, so that it is a gap
  Returns {'ok'} | {'kept'}
]]
local record, hydration, channel = KEYS[1], KEYS[2], KEYS[3]
local version, told = ARGV[1], ARGV[2]
local head = redis.call('HMGET', record, '#v', '#deleted')
if head[1] and (head[1] ~= version or not head[2]) then return {'kept'} end
redis.call('DEL', record, hydration)
redis.call('SPUBLISH', channel, told)
return {'ok'}
