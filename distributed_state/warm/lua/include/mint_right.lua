--[[
  Whether the caller may start the partition: mint.lua gave it the right in this life, and to no other caller after that.
  Expects  meta, life, token, seen (the previous epoch, when the right was given; '' = none)
  Defines  may
]]
local holder, held_epoch = unpack(redis.call('HMGET', meta, 'mint', 'epoch'))
local may = string.match(holder or '', '^%S*') == token and (held_epoch or '') == seen
  and string.sub(token, -#life - 1) == '@' .. life
