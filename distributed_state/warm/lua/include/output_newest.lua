--[[
  The newest entry of a session's output.
  Expects  call; output; token (of the lock, as text); content (of the entry to be added)
  Defines  last            the number of this token's last entry in the stream, 0 = none
           total, floor    bytes that the stream had until now, and those of them that were removed
           size            of the added entry: allocators round up by a quarter at most, and an entry has its id and head
]]
local last, total, floor, size = 0, 0, 0, math.floor(#content * 1.25) + 64
local newest = call('XREVRANGE', output, '+', '-', 'COUNT', 1)[1]
if newest then
  local of, reached = string.match(newest[1], '^(%d+)-(%d+)$')
  if of == token then last = reached + 0 end
  local bytes, removed = string.match(newest[2][2], '^(%d+) (%d+)')
  total, floor = bytes + 0, removed + 0
end
