--[[
  Whether a record that is not here is surely new: SQL had none of that name when the epoch began, and none was begun or
  brought in since. Names are kept in 16 fields of meta by a number of seven digits: the last one says in which, the
  others stand for the name. What is found may be another one's; what is not found is nobody's. As in warm/partitions.py.
  Expects  meta, text, current, and these declared
  Defines  place, mark   the field, and what stands for the name
           listed        what the field holds
           unheard       whether it is new, and there is room to note it
           fresh         ms of the server's clock, false = none: what was sent before may have been applied in another life
]]
local number, names = 0, nil
-- Exact in doubles. The embedded server has no sha1hex.
local bytes = {string.byte(text, 1, -1)}
for i = 1, #bytes do number = (number * 65599 + bytes[i]) % 268435399 end
local digits = string.format('%07x', number)
place, mark = 'k' .. string.sub(digits, 7), string.sub(digits, 1, 6)
names, listed, fresh = unpack(redis.call('HMGET', meta, 'names', place, 'fresh'))
listed = listed or ''
-- In a full one names may be missing; so they may where nobody asked SQL for this epoch.
unheard = names == current and #listed < 4092 and not string.find(listed, mark, 1, true)
