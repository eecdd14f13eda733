--[[
  Drop archived journal entries; the last archived one stays, so that the archiver can compare it with its cursor.
  KEYS  journal  meta
  ARGV  epoch, offset, total_bytes at that offset
  Returns {'ok'} | {'epoch'}
]]
local journal, meta = KEYS[1], KEYS[2]
local epoch, offset, bytes = ARGV[1], ARGV[2], ARGV[3]
local place = redis.call('HMGET', meta, 'epoch', 'archived_offset')
if place[1] ~= epoch then return {'epoch'} end
redis.call('XTRIM', journal, 'MINID', offset .. '-0')
if tonumber(offset) > tonumber(place[2]) then
  redis.call('HSET', meta, 'archived_offset', offset, 'archived_bytes', bytes)
end
return {'ok'}
