--[[
  The op ids of a small record as one text. They are stored in fields of at most 64 bytes, '#ops', '#ops1', '#ops2', ...:
  one longer value would make Redis store the record in a hash table from then on, which takes twice the bytes.
  Expects  record, ops (its field '#ops', false = none)
  Defines  ops      all of them
           pieces   names of the fields that hold the rest, nil if there are none
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
