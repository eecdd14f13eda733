--[[
  Whether the caller may start the partition: mint.lua gave it the right under this data id, and to no other caller after that.
  Expects  meta, data_id, token, seen (the previous epoch, when the right was given; '' = none)
  Defines  may
]]
local holder, held_epoch = unpack(redis.call('HMGET', meta, 'mint', 'epoch'))
local may = string.match(holder or '', '^%S*') == token and (held_epoch or '') == seen
  and string.sub(token, -#data_id - 1) == '@' .. data_id
