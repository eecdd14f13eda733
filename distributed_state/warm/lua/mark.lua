--[[
  Write a journal entry that changes nothing, so that entries before it can be trimmed.
  KEYS  journal  meta
  ARGV  data_id (of the connection: see port/identities.py), epoch, event
  Returns {'ok', offset} | {'epoch'}
]]
local journal, meta = KEYS[1], KEYS[2]
local data_id, epoch, event = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
-- @include clock
local written = call('HGET', meta, 'journal')
-- @include written
-- @include same_data
-- @include journal_end
if current ~= epoch then return {'epoch'} end
-- After a first write that takes no memory even a full Redis accepts the rest, which makes room.
redis.call('PERSIST', journal)
-- No record, version 0: the archiver moves on and inserts nothing.
local entry_id, text, version, kind = event, '', '0', 'mark'
local actor, token_held, last_message, data, last_event = '', '0', '0', '', nil
-- @include journal
return {'ok', offset}
