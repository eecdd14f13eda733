--[[
  Drop archived journal entries; the last archived one stays, so that the archiver can compare it with its cursor.
  KEYS  journal  meta
  ARGV  epoch, offset, event   of the entry that stays; with another one there nothing is dropped
        total_bytes at that offset
  Returns {'ok'} | {'epoch'} | {'other'}
]]
local journal, meta = KEYS[1], KEYS[2]
local epoch, offset, event, bytes = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local place = redis.call('HMGET', meta, 'epoch', 'archived_offset')
if place[1] ~= epoch then return {'epoch'} end
-- @include same_entry
redis.call('XTRIM', journal, 'MINID', offset .. '-0')
if tonumber(offset) > tonumber(place[2]) then
  redis.call('HSET', meta, 'archived_offset', offset, 'archived_bytes', bytes)
end
return {'ok'}
