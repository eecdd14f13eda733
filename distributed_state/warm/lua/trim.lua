--[[
  Drop archived journal entries; the last archived one stays, so that the archiver can compare it with its cursor.
  KEYS  journal  meta
  ARGV  data_id of the connection: see port/identities.py
        epoch, offset, event   of the entry that stays; with another one there nothing is dropped
        total_bytes at that offset
  Returns {'ok'} | {'epoch'} | {'other'}
]]
local journal, meta = KEYS[1], KEYS[2]
local data_id, epoch, archived, event, total_bytes = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local call = redis.call
-- @include clock
local written = call('HGET', meta, 'journal')
-- @include written
-- @include same_data
if current ~= epoch then return {'epoch'} end
local last = offset
offset = archived
-- @include same_entry
call('XTRIM', journal, 'MINID', archived .. '-0')
if archived - archived_offset > 0 then
  call('HSET', meta, 'journal', current .. ' ' .. last .. ' ' .. bytes .. ' ' .. archived .. ' ' .. total_bytes .. ' ' .. data_id .. ' ' .. proved)
end
return {'ok'}
