--[[
  Continue only if the journal has this entry at this offset. Redis may have come back with older data after the entry was
  read; then offsets and versions of the caller do not apply to this data.
  Expects  journal, offset, event
  Returns  {'other'}, or goes on
]]
local entry = redis.call('XRANGE', journal, offset .. '-0', offset .. '-0')[1]
if not entry or string.sub(entry[2][2], 1, #event + 1) ~= event .. '\n' then return {'other'} end
