--[[
  Do nothing, unless the journal holds this entry at this offset: Redis may have come back older since the entry was
  read, and then neither an offset nor a version says anything about what is here now.
  Expects  journal, offset, event
  Returns  {'other'}, or goes on
]]
local entry = redis.call('XRANGE', journal, offset .. '-0', offset .. '-0')[1]
if not entry or string.sub(entry[2][2], 1, #event + 1) ~= event .. '\n' then return {'other'} end
