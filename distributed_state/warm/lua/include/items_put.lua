--[[
  Put items into the window, and begin it where there is none.
  Expects  items_expected; version, fields, n, results, gone, said of the change
  Defines  item_step(step, name, value)   what the journal has of a step, false if nothing
           begin_items()                  the step that notes the record's first item, nil if this is not it
           put_items()                    writes; version is the new one by then
]]
local puts, reset = {}, ''
item_step = function(step, name, value)
  if step == 'p' or step == 'q' or step == 'n' then
    if step == 'n' then
      local free = known[name] == '-'
      results = (results == '' and '' or results .. ',') .. (free and '1' or '0')
      if not free then return false end
      step = 'p'
    end
    puts[#puts + 1], puts[#puts + 2] = name, value
    return step, name, value
  end
  if step ~= 'y' then return not string.find('APMVG', step, 1, true) and step, name, value end
  if since == '' then return false end
  reset, said = value, said .. 'y'
  value = format('%d', (version or 0) + 1) .. ' ' .. value
  n = n + 2
  fields[n - 1], fields[n] = '#items', value
  gone = gone or {}
  gone[#gone + 1] = '#kv'
  return 's', '#items', value
end
begin_items = function()
  if since ~= '' or begins or not puts[1] then return nil end
  said = said .. 'i'
  local first = format('%d', (version or 0) + 1)
  n = n + 2
  fields[n - 1], fields[n] = '#items', first
  return 's6:' .. #first .. ':#items' .. first
end
put_items = function()
  if not puts[1] then
    if reset ~= '' then call('DEL', items) end
    return
  end
  local number, count, size, put, m, left = 0, 0, 0, {}, 0, {}
  if window and reset == '' then
    number, count, size = window[2] + 0, window[4] + 0, window[5] + 0
  else
    call('DEL', items)
    held = {}
    put, m = {'#e', epoch, '#d', '1', '#f', reset ~= '' and version or format('%d', needed)}, 6
    if reset == '' and (begins or not bare) or reset ~= '' and reset ~= '0' then
      m = 8
      put[7], put[8] = '#u', '1'
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
  if reset == '' then
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
  call('HSET', items, unpack(put, 1, m))
  call('PERSIST', items)
  n = n + 2
  fields[n - 1], fields[n] = '#kv', version
end
