--[[
  Add the id of a record that is imported into SQL to the known ids, so that it is not taken for new.
  KEYS  meta
  ARGV  data_id  of the connection: see port/identities.py
        epoch, text
  Returns {'ok'} | {'epoch'}
]]
local meta = KEYS[1]
local data_id, epoch, text = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include epoch
-- @include same_data
if current ~= epoch then return {'epoch'} end
local place, mark, listed, is_new, fresh
-- @include known_ids
-- After a first write that takes no memory even a full Redis accepts the rest.
redis.call('PERSIST', meta)
if is_new then redis.call('HSET', meta, place, listed .. mark) end
return {'ok'}
