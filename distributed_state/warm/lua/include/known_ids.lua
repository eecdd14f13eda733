--[[
  Whether a record that is not here is new: its id is not among the known ids of the partition, which are those of all
  records that SQL had when the epoch began, and of all that were begun or imported since. They are kept in 16 fields of
  meta. An id becomes a number of seven digits: the last digit chooses the field, the others are appended there. Another
  id may have the same digits; an id whose digits are missing belongs to no record. As in warm/partitions.py.
  Expects  meta, text, current, and these declared
  Defines  place, mark   the field, and the digits of the id
           listed        what the field holds
           is_new        whether it is new, and there is room to add it
           fresh         ms of the server's clock, false = none: what was sent before may have been applied to other data
]]
local number, complete = 0, nil
-- Exact in doubles. The embedded server has no sha1hex.
local bytes = {string.byte(text, 1, -1)}
for i = 1, #bytes do number = (number * 65599 + bytes[i]) % 268435399 end
local digits = string.format('%07x', number)
place, mark = 'k' .. string.sub(digits, 7), string.sub(digits, 1, 6)
complete, listed, fresh = unpack(redis.call('HMGET', meta, 'names', place, 'fresh'))
listed = listed or ''
-- A full field lacks ids; so do all fields if SQL was not asked for this epoch.
is_new = complete == current and #listed < 4092 and not string.find(listed, mark, 1, true)
