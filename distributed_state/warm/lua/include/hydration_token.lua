--[[
  The hydration token of an absent record: the one that lies there, else a new one.
  Expects  clock, hydration, token (what a new one begins with), current (the epoch, with which it ends)
  Defines  left   the token; '' if Redis is too full to leave one
]]
-- One that another reader left is as good: while it is there, nobody has created or hydrated the record.
local left = redis.call('GET', hydration)
-- One of another epoch may belong to a reader who saw what is there no more.
if not left or string.sub(left, -#current - 1) ~= '@' .. current then
  -- The time makes it another one when this call is repeated: somebody may still hold the first.
  left = token .. '.' .. now[1] .. '.' .. now[2] .. '@' .. current
  if redis.pcall('SET', hydration, left, 'PX', 30000).err then left = '' end
end
