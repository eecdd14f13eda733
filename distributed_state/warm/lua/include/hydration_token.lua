--[[
  The hydration token of an absent record: the present one, else a new one.
  Expects  clock, hydration, token (what a new one begins with), current (the epoch, with which it ends)
  Defines  hydration_token   '' if Redis is too full to leave one
]]
-- A token of another reader serves as well: while it exists, the record was neither created nor hydrated.
local hydration_token = redis.call('GET', hydration)
-- A token of another epoch may belong to a reader of data that was lost meanwhile.
if not hydration_token or string.sub(hydration_token, -#current - 1) ~= '@' .. current then
  -- The time makes it differ from the token of an earlier attempt of this call, which a reader may still hold.
  hydration_token = token .. '.' .. now[1] .. '.' .. now[2] .. '@' .. current
  if redis.pcall('SET', hydration, hydration_token, 'PX', 30000).err then hydration_token = '' end
end
