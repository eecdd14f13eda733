--[[
  When an entry of a journal, or of a stream of events, was written.
  Expects  head    of the entry, as journal.lua and events.lua write it
  Defines  written_ms    ms of the server's clock, a number with a fraction
]]
local seconds, micros = string.match(head, '^[^\n]*\n[^\n]*\n[^\n]*\n(%d+) (%d+)')
local written_ms = seconds * 1000 + micros / 1000
