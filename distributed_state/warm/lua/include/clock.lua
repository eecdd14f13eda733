--[[
  The server's time, and whole numbers as text: Lua would write a large one with an exponent.
  Expects  nothing
  Defines  now      {seconds, microseconds}, as texts
           now_ms   the same in ms, a number with a fraction
           whole()  a number as text, without its fraction
]]
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + now[2] / 1000
local format = string.format
local function whole(number) return format('%d', number) end
