--[[
  The effects of a change on its record's items. Only the last of these functions writes.
  Expects  item_checks, item_window; call, format, items, epoch; declared: item_operation, new_layer, write_items
  Defines  item_operation(operation, name, value)   an operation as the journal has it, false = it has none; for an 'n'
                                          also '1' if it puts its item, else '0'
           new_layer(version)             the value of '#items' if a layer begins with this version of the record, and how:
                                          'y' by an operation, 'i' with the record's first items; else nil
           write_items(version)           writes them to the window; whether there are any
]]
-- Puts and deletions, as pairs; and the version whose items lie below a new layer, nil = none begins.
local puts, below = {}, nil
item_operation = function(operation, name, value)
  if operation == 'p' or operation == 'q' or operation == 'n' then
    local put
    if operation == 'n' then
      if known[name] ~= '-' then return false, nil, nil, '0' end
      operation, put = 'p', '1'
    end
    puts[#puts + 1], puts[#puts + 2] = name, value
    return operation, name, value, put
  end
  if operation ~= 'y' then return not string.find('APMVG', operation, 1, true) and operation, name, value end
  if layer_from == '' then return false end
  below, operation, name = value, 's', '#items'
  return operation, name, format('%d', (version or 0) + 1) .. ' ' .. value
end
new_layer = function(version)
  if below then return version .. ' ' .. below, 'y' end
  if layer_from == '' and not begins and puts[1] then return version, 'i' end
end
write_items = function(version)
  if not puts[1] then
    if below then call('DEL', items) end
    return false
  end
  local number, count, size, put, m, left = 0, 0, 0, {}, 0, {}
  if window and not below then
    number, count, size = window[2] + 0, window[4] + 0, window[5] + 0
  else
    -- Only if the key exists: a full Redis refuses a first write that takes memory, but not one after a deletion.
    if below or call('EXISTS', items) == 1 then call('DEL', items) end
    held = {}
    put, m = {'#e', epoch, '#d', '1', '#f', below and version or format('%d', needed)}, 6
    if not below and (begins or not bare) or below and below ~= '0' then
      m = 8
      put[7], put[8] = '#u', not below and about[2] and '2' or '1'
    end
  end
  for i = 1, #puts, 2 do
    local name, before = puts[i], held[puts[i]]
    if before then
      left[#left + 1] = 'k' .. string.match(before, '^%d+')
      count, size = count - 1, size - #before - #name
    end
    number, count = number + 1, count + 1
    local digits = format('%d', number)
    local entry = digits .. ' ' .. version .. ' ' .. puts[i + 1]
    size = size + #entry + #name
    m = m + 4
    put[m - 3], put[m - 2] = ':' .. name, entry
    put[m - 1], put[m] = 'k' .. digits, version .. ' ' .. format('%d', #entry + #name) .. ' ' .. name
  end
  if not below then
    for collection, key in pairs(greatest) do
      if key then
        m = m + 2
        put[m - 1], put[m] = '#h' .. collection, key
      end
    end
  end
  if left[1] then call('HDEL', items, unpack(left)) end
  m = m + 6
  put[m - 5], put[m - 4], put[m - 3], put[m - 2] = '#n', format('%d', number), '#c', format('%d', count)
  put[m - 1], put[m] = '#b', format('%d', size)
  -- A caller changes a thousand items at most, a fork of a branch ten times as many.
  for i = 1, m, 7000 do call('HSET', items, unpack(put, i, math.min(i + 6999, m))) end
  call('PERSIST', items)
  return true
end
