--[[
  The server's time, and the function that writes numbers: format('%d', n), because Lua would write large ones with an
  exponent.
  Expects  nothing
  Defines  now      {seconds, microseconds}, as texts
           now_ms   the same in ms, a number with a fraction
           format   Lua's; '%d' drops a fraction
]]
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + now[2] / 1000
local format = string.format
