--[[
  The operations that the store adds to those of the caller: a new layer of items, the owner, the end of a deletion.
  Expects  version (the new one), items, new_layer (of item_writes), owner, record, head, deleted
           fields, n, gone, change, changes, public, flags of operations.lua, to which it adds
  Defines  layer, how    of items that begin with this commit, nil = none
]]
local layer, how
if items then layer, how = new_layer(version) end
if layer then
  flags = how
  n = n + 2
  fields[n - 1], fields[n] = '#items', layer
  if how == 'y' then
    gone = gone or {}
    gone[#gone + 1] = '#kv'
  else
    changes = changes or {change}
    changes[#changes + 1] = 's6:' .. #layer .. ':#items' .. layer
    public[#public + 1] = changes[#changes]
  end
end
if owner ~= '' and not call('HGET', record, '#owner') then
  flags, n, changes = flags .. 'o', n + 2, changes or {change}
  fields[n - 1], fields[n] = '#owner', owner
  changes[#changes + 1] = 's6:' .. #owner .. ':#owner' .. owner
  if public then public[#public + 1] = changes[#changes] end
end
if head[3] and deleted == 'expired' then
  flags, gone, changes = flags .. 'a', gone or {}, changes or {change}
  gone[#gone + 1], changes[#changes + 1] = '#deleted', 'd8:0:#deleted'
  if public then public[#public + 1] = changes[#changes] end
end
