--[[
  Remove a record that was erased up to a version from Redis, unless it has a later version, and let replicas drop their
  copies.
  KEYS  record  hydration  channel  lifetimes  items  leases  lock  output  stop
  ARGV  version
        message  to publish: a change after that version, which replicas take for a gap
        text     its member of the lifetimes
  Returns {'ok'} | {'kept'}
]]
local record, hydration, channel, lifetimes, items, leases, lock, output, stop = unpack(KEYS)
local version, message, text = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local present = redis.call('HGET', record, '#v')
-- Not only tombstones are dropped: a record that was hydrated and then erased in SQL must not stay.
if present and tonumber(present) > version then return {'kept'} end
redis.call('DEL', record, hydration, items, output, stop)
redis.call('ZREM', lifetimes, text)
if redis.call('EXISTS', lock) == 0 then redis.call('ZREM', leases, record) end
redis.call('SPUBLISH', channel, message)
return {'ok'}
