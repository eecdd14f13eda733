--[[
  The last entry of a partition's journal; event '' if nothing was written yet, or the journal lacks it.
  KEYS  journal  meta
  ARGV  none
  Returns {'ok', epoch, offset, event} | {'uninitialised'}
]]
local journal, meta = KEYS[1], KEYS[2]
local place = redis.call('HMGET', meta, 'epoch', 'offset')
if not place[1] then return {'uninitialised'} end
local entry = redis.call('XRANGE', journal, place[2] .. '-0', place[2] .. '-0')[1]
return {'ok', place[1], place[2], entry and string.match(entry[2][2], '^[^\n]*') or ''}
