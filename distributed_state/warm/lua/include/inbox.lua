--[[
  The effects of operations on the inbox: 'I' adds an input, named by the tag of its request, '' = none. 'W' adds a wake,
  which is due later, and replaces the waiting one with its tag: its value is '+' (ms from now), '@' (a time) or '~' (a time,
  and only if this change takes out the one with its tag), the ms, a space, and the content. 'T' takes out those that its value names: numbers, each with ':' and the tag of its request, if
  it has one; its name has the requests that are forgotten, in the same form. The field '#b' has the number of the next
  one, how many there are, and their bytes, then for each wake its number, ':' and when it is due; '#b' and a number is an
  input; '#bq' and the tag of its request has its number, and then the version that served it.
  Expects  clock; call, words, record, version (false = absent), kind, inbox_limit, inbox_bytes; inputs, scheduled
           fields, n, gone, change, changes, public, results of operations.lua, to which it adds
  Defines  put      a function that sets a field, or deletes it if its content is ''
           noted    a function that adds results
           entries, wakes    how many inputs there are, and for each wake {number, due ms}; both only with `inputs` or `scheduled`
           for an 'I', results has what '#b' has now, with how many wakes there are; for a 'T', first 1 or 0 for each input and for each forgotten request:
           whether it was there; for a 'W', first the number of the replaced wake (0 = none), and when the new one is due (0 = it was not added)
  Returns  {'posted', number}, {'inbox', inputs, bytes}, or goes on
]]
local following, entries, used, wakes, taken
local function put(field, content)
  local piece = content == '' and 'd' or 's'
  if piece == 'd' then
    gone = gone or {}
    gone[#gone + 1] = field
  else
    n = n + 2
    fields[n - 1], fields[n] = field, content
  end
  piece = piece .. format('%d:%d:', #field, #content) .. field .. content
  if public then public[#public + 1] = piece end
  if change then
    changes = changes or {change}
    changes[#changes + 1] = piece
  else
    change = piece
  end
end
local function noted(result) results = (results == '' and '' or results .. ',') .. table.concat(result, ',') end
-- Whether the input was there.
local function remove(number)
  local input = not taken[number] and call('HGET', record, '#b' .. number)
  if not input then return false end
  -- Without the mark with the time: '!1', 15 digits and a space.
  taken[number], entries, used = true, entries - 1, used - #input + 18
  for at = #wakes, 1, -1 do
    if wakes[at][1] == number then table.remove(wakes, at) end
  end
  put('#b' .. number, '')
  return true
end
if inputs or scheduled then
  local counts = call('HGET', record, '#b') or '1 0 0'
  following, entries, used = string.match(counts, '^(%d+) (%d+) (%d+)')
  wakes, taken = {}, {}
  for number, due in string.gmatch(counts, '(%d+):(%d+)') do wakes[#wakes + 1] = {number, due} end
end
for _, i in ipairs(inputs or {}) do
  local operation, name, value = words[i], words[i + 1], words[i + 2]
  local removed, result = 0, {}
  local posted = operation ~= 'T' and name ~= '' and call('HGET', record, '#bq' .. name)
  local due, content = now_ms, value
  if operation == 'W' then
    local relative, ms
    relative, ms, content = string.match(value, '^([+@~])(%d+) (.*)$')
    due = (relative == '+' and now_ms or 0) + ms
    local replaced = posted and string.match(posted, '^%d+$')
    if relative == '~' and not taken[replaced or ''] then due = 0 end
    if due == 0 or not (replaced and remove(replaced)) then replaced = '0' end
    result[1], result[2] = replaced, format('%d', due)
  elseif posted then
    return {'posted', string.match(posted, '^%d+')}
  end
  for number, request in string.gmatch(operation == 'T' and value or '', '(%d+):?(%x*)') do
    local there = remove(number)
    result[#result + 1] = there and '1' or '0'
    if there then
      removed = removed + 1
      if request ~= '' then put('#bq' .. request, number .. ' ' .. format('%d', (version or 0) + 1)) end
    end
  end
  for number, request in string.gmatch(operation == 'T' and name or '', '(%d+):(%x+)') do
    local kept = call('HGET', record, '#bq' .. request)
    -- Its input was served or withdrawn when the caller looked, and numbers are used once. If it was posted again since, it
    -- has another number.
    local known = kept and string.match(kept, '^%d+') == number
    result[#result + 1] = known and '1' or '0'
    if known then put('#bq' .. request, '') end
  end
  if operation == 'T' and removed == 0 and kind == 'post' then return {'posted', '0'} end
  if operation ~= 'T' and due ~= 0 then
    -- A turn has more room for its wakes: it must not fail because inputs came meanwhile.
    local most, bytes = inbox_limit, inbox_bytes
    if kind == 'turn' then most, bytes = math.max(most, math.min(2 * most, 1000)), 2 * bytes end
    if entries + 1 > most or used + #content > bytes then return {'inbox', entries, used} end
    put('#b' .. format('%d', following), '!1' .. format('%015d', due) .. ' ' .. content)
    if operation == 'W' then wakes[#wakes + 1] = {format('%d', following), format('%d', due)} end
    following, entries, used = following + 1, entries + 1, used + #content
  end
  -- A new encryption changes the size of an input, and does not count again.
  used = entries + 0 > 0 and math.max(used, 0) or 0
  local counts, all = format('%d %d %d', following, entries, used), {}
  result[#result + 1] = format('%d,%d,%d,%d', following, entries, used, #wakes)
  for at, wake in ipairs(wakes) do
    result[#result + 1], all[at] = wake[1] .. ',' .. wake[2], ' ' .. wake[1] .. ':' .. wake[2]
  end
  put('#b', counts .. table.concat(all))
  if operation ~= 'T' and due ~= 0 and name ~= '' then put('#bq' .. name, format('%d', following - 1)) end
  noted(result)
end
