--[[
  The hydration token of an absent record: the present one, else a new one.
  Expects  clock, hydration, token (what a new one begins with), current (the epoch, with which it ends)
  Defines  hydration_token   '' if Redis is too full to leave one
]]
-- One that another reader left is as good: as long as it exists, nobody has created or hydrated the record.
local hydration_token = redis.call('GET', hydration)
-- One of another epoch may belong to a reader of data that was lost since.
if not hydration_token or string.sub(hydration_token, -#current - 1) ~= '@' .. current then
  -- The time makes it differ from that of an earlier attempt of this call, which somebody may still hold.
  hydration_token = token .. '.' .. now[1] .. '.' .. now[2] .. '@' .. current
  if redis.pcall('SET', hydration, hydration_token, 'PX', 30000).err then hydration_token = '' end
end
