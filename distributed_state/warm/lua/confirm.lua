--[[
  Say whether a commit is in the data of this server, and if it is, write something: whoever waits behind this on the
  same connection for replicas or for the disk waits for all that was written before, this commit included. A server may
  have come back older, or be another one by now, and would confirm what it never had. And a connection that wrote
  nothing is answered at once by Valkey: it has nothing to wait for.
  KEYS  journal  meta  record
  ARGV  life     of the connection: see port/lives.py
        epoch    under which it was committed
        at       its offset in the journal; of one that was sent again, of the journal's end at that time
        event    its entry's id, '' = whichever made the record what it is
        version  which the record has, or an older one; asked only without an event
        back     how many entries may stand between that end and it, '0' = none
  Returns {'ok'} | {'epoch', epoch or ''}
        | {'other'}   it is not here: lost, or archived and dropped since; SQL knows
]]
local journal, meta, record = KEYS[1], KEYS[2], KEYS[3]
local life, epoch, at, event, version, back = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local call = redis.call
-- Not same_data: a commit is known by its event, and a mere change of the data's name must not make it look lost.
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
