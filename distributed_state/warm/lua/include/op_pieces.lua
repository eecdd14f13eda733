--[[
  The op ids of a small record whole. In it they stand in fields of at most 64 bytes, '#ops', '#ops1', '#ops2', ...: one
  longer value would make Redis keep all of the record in a hash table, for good, which takes twice the bytes.
  Expects  record, ops (its field '#ops', false = none)
  Defines  ops      all of them
           pieces   names of the fields in which the rest stands, nil if there are none
]]
local pieces
if ops and #ops == 64 then
  pieces = {}
  local last = ops
  while last and #last == 64 do
    local name = '#ops' .. #pieces + 1
    last = redis.call('HGET', record, name)
    if last then ops, pieces[#pieces + 1] = ops .. last, name end
  end
end
