--[[
  Whether this is who may start the partition: mint.lua gave the right, and nobody else has got it since.
  Expects  meta, token, seen (the epoch before, as it was when the right was given; '' = none)
  Defines  may
]]
local holder, held_epoch = unpack(redis.call('HMGET', meta, 'mint', 'epoch'))
local may = string.match(holder or '', '^%S*') == token and (held_epoch or '') == seen
