--[[
  Check the items that a change names. Operations by an item's name: 'p' put, 'q' delete, 'n' put if it is absent, else
  do nothing. Conditions on the item: 'A' absent, 'P' present, 'M' of this version. Results of the caller's read in SQL:
  'V' of an item 'epoch version ' and the item's version or '-', 'G' of a collection the same with '=' and its greatest
  key.
  'y': a new layer begins, and the items of this version lie below it, '0' = none: see item_window.
  Expects  item_window; call, format, words, first_operation, record, items, epoch
  Defines  held      what the window has of each item that is named, false = nothing
           known     the versions of those of which something is expected, '-' = absent
           begins    whether the change itself sets where a layer begins, as a fork does
  Returns  {'item', name, version or '-'}, {'items', epoch, needed}, or goes on
]]
local held, known, begins = {}, {}, false
local names, wanted = {}, {}
for i = first_operation, #words, 3 do
  local operation, name, value = words[i], words[i + 1], words[i + 2]
  if operation == 'V' or operation == 'G' then
    -- It counts unless it is out of date: all that is not here is in SQL, and so is the beginning of the layer.
    local of, archived, sql_version = string.match(value, '^(%S+) (%d+) (.*)$')
    if of == epoch and archived - needed >= 0 then
      if operation == 'V' then sql_versions[name] = sql_version elseif not top(name) then greatest[name] = sql_version end
    end
  elseif operation == 's' and name == '#items' then
    begins = true
  elseif string.find('pqnAPM', operation, 1, true) and held[name] == nil then
    held[name] = false
    names[#names + 1], wanted[#wanted + 1] = name, ':' .. name
  end
end
if window and names[1] then
  local found = call('HMGET', items, unpack(wanted))
  for i, name in ipairs(names) do held[name] = found[i] end
end
local unknown = false
for i = first_operation, #words, 3 do
  local operation, name, value = words[i], words[i + 1], words[i + 2]
  if operation == 'A' or operation == 'P' or operation == 'M' or operation == 'n' then
    local is = stamp(name, held[name])
    if not is then
      unknown = true
    elseif operation == 'A' and is ~= '-' or operation == 'P' and is == '-' or operation == 'M' and is ~= value then
      return {'item', name, is}
    end
    known[name] = is
  end
end
if unknown then return {'items', epoch, format('%d', needed)} end
