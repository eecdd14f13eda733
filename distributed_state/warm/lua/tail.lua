--[[
  The last entry of a partition's journal; event '' if there is none yet, or the journal lacks it.
  KEYS  journal  meta
  ARGV  data_id  of the connection: see port/identities.py
  Returns {'ok', epoch, offset, event} | {'uninitialised'}
]]
local journal, meta = KEYS[1], KEYS[2]
local data_id, call = ARGV[1], redis.call
-- @include clock
local written = call('HGET', meta, 'journal')
-- @include written
-- @include same_data
if not current then return {'uninitialised'} end
local entry = call('XRANGE', journal, offset .. '-0', offset .. '-0')[1]
return {'ok', current, offset, entry and string.match(entry[2][2], '^[^\n]*') or ''}
