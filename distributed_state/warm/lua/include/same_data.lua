--[[
  Whether the server still has the data with which the connection was made. A server that was made a replica and promoted
  again keeps its connections, and may have older data then: a copy, in which the partition's data id is the connection's. So
  the server is asked for its replication id, every 20 ms at most for each partition, which notes when that was. A copy
  contains its own older note, and copying takes longer than 20 ms.
  While a slot of a cluster moves key by key, the note is not updated, so that it says when the partition was last complete:
  a server that ended meanwhile may have lost keys that it received, or have older ones: see Recovery._is_same.
  Expects  clock, meta, data_id (of the connection), current, written, proved (the note)
  Defines  same
           current    nil if not
           proved     the new note
]]
local same, age = true, proved and now_ms - proved
if not age or age > 20 or age < 0 then
  local data = string.match(data_id, '^(%x+)/')
  local info = data and redis.pcall('INFO', 'replication')
  -- If the user has no right to ask, the data counts as the same (port/identities.py).
  same = type(info) ~= 'string' or string.find(info, 'master_replid:' .. data, 1, true)
  -- A node that hands over a slot refuses the keys of it that it does not have; this one is never there. It is not one of
  -- KEYS: then the node would refuse the whole script.
  local there = redis.pcall('EXISTS', meta .. '?')
  local moving = type(there) == 'table' and string.find(there.err, 'non local key', 1, true)
  -- A full Redis cannot store the note, and a server that became a replica may be behind.
  local noted
  if same and data and current and not moving then
    proved = format('%d', now_ms)
    noted = redis.pcall('HSET', meta, 'journal', string.match(written, '^.* ') .. proved)
  end
  if type(noted) == 'table' and string.find(noted.err, 'READONLY', 1, true) then same = false end
  if not same then current = nil end
end
