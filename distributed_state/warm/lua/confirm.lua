--[[
  Check that this server has a commit, and if it has, write something. A WAIT or WAITAOF that follows on the
  same connection then waits for all earlier writes, this commit included. Without the check, a server that came back with
  older data, or another server, would confirm a commit that it never had. Without the write, Valkey answers at once, because the
  connection has written nothing.
  KEYS  journal  meta  record
  ARGV  data_id  of the connection: see port/identities.py
        epoch    under which it was committed
        at       its offset in the journal; if it was sent again, the offset of the journal's end at that time
        event    its entry's id, '' = not known: the record's version is checked instead
        version  the record must have at least this one; used only without an event
        back     how many entries may be between the commit and that end, '0' = none
  Returns {'ok'} | {'epoch', epoch or ''}
        | {'other'}   it is not here: lost, or archived and trimmed; SQL knows which
]]
local journal, meta, record = KEYS[1], KEYS[2], KEYS[3]
local data_id, epoch, at, event, version, back = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local call = redis.call
-- same_data is not included: the event identifies the commit, which is not lost if only the data id changed.
local written = call('HGET', meta, 'journal')
-- @include written
if current ~= epoch then return {'epoch', current or ''} end
local here = false
if event == '' then
  here = (call('HGET', record, '#v') or -1) + 0 >= version + 0
else
  local from = at - back
  if from < 0 then from = 0 end
  for _, entry in ipairs(call('XRANGE', journal, string.format('%d', from) .. '-0', at .. '-0', 'COUNT', back + 1)) do
    here = here or string.sub(entry[2][2], 1, #event + 1) == event .. '\n'
  end
end
if not here then return {'other'} end
call('HSET', meta, 'confirmed', offset)
return {'ok'}
