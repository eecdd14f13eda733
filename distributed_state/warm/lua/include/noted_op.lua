--[[
  The op ids that a record keeps after this commit, as known_op.lua finds them, and op_pieces.lua puts them together.
  Expects  clock, known_op, pieces (of op_pieces); replica, sequence, digest, version (the new one), fields, n, gone
           size, growth, first_message, last_message, results
  Defines  noted    the value of '#ops'; further pieces are added to fields, and fields that are no longer needed to gone
]]
local noted = others .. replica .. ' ' .. mine_oldest .. ' ' .. now[1] .. mine .. ' '
  .. sequence .. ':' .. version .. ':' .. digest .. ':' .. first_message .. ',' .. results
local parts = 0
-- A record with messages is a hash table in any case: a message is seldom as short as 64 bytes.
if #noted > 64 and #noted <= 1024 and last_message == '0' and size + growth <= 1024 then
  for at = 65, #noted, 64 do
    parts, n = parts + 1, n + 2
    fields[n - 1], fields[n] = '#ops' .. parts, string.sub(noted, at, at + 63)
  end
  noted = string.sub(noted, 1, 64)
end
for i = parts + 1, pieces and #pieces or 0 do
  gone = gone or {}
  gone[#gone + 1] = pieces[i]
end
