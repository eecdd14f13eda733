--[[
  Keys in the order of their bytes: Lua's own order of texts is that of the server's locale.
  Expects  nothing
  Defines  behind(a, b)   whether a is greater than b
]]
local function behind(a, b)
  local at, shorter = 1, math.min(#a, #b)
  -- Compared in parts, because keys have long common beginnings.
  while at <= shorter and string.sub(a, at, at + 31) == string.sub(b, at, at + 31) do at = at + 32 end
  for i = at, math.min(at + 31, shorter) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return #a > #b
end
