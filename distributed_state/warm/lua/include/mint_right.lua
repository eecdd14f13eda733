--[[
  Whether this is who may start the partition: mint.lua gave the right in this life, and nobody else has got it since.
  Expects  meta, life, token, seen (the epoch before, as it was when the right was given; '' = none)
  Defines  may
]]
local holder, held_epoch = unpack(redis.call('HMGET', meta, 'mint', 'epoch'))
local may = string.match(holder or '', '^%S*') == token and (held_epoch or '') == seen
  and string.sub(token, -#life - 1) == '@' .. life
