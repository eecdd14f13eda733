--[[
  Drop archived journal entries; the last archived one stays, so that the archiver can compare it with its cursor.
  KEYS  journal  meta
  ARGV  epoch, offset, event   of the entry that stays; with another one there nothing is dropped
        total_bytes at that offset
  Returns {'ok'} | {'epoch'} | {'other'}
]]
local journal, meta = KEYS[1], KEYS[2]
local epoch, offset, event, total_bytes = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local call = redis.call
if call('HGET', meta, 'epoch') ~= epoch then return {'epoch'} end
-- @include same_entry
call('XTRIM', journal, 'MINID', offset .. '-0')
local archived = offset
-- @include written
if archived - archived_offset > 0 then
  call('HSET', meta, 'journal', current .. ' ' .. offset .. ' ' .. bytes .. ' ' .. archived .. ' ' .. total_bytes)
end
return {'ok'}
