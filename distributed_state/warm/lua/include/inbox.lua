--[[
  The effects of operations on the inbox: 'I' adds an input, named by the tag of its request, '' = none. 'T' takes out those
  that its value names: numbers, each with ':' and the tag of its request, if it has one; its name has the requests that are
  forgotten, in the same form. The field '#b' has the number of the next one, how many there are, and their
  bytes; '#b' and a number is an input; '#bq' and the tag of its request has its number, and then the version that served it.
  Expects  clock; call, words, record, version (false = absent), kind, inbox_limit, inbox_bytes; inputs
           fields, n, gone, change, changes, public, results of operations.lua, to which it adds
  Defines  nothing: for an 'I', results has what '#b' has now; for a 'T', first 1 or 0 for each input and for each forgotten
           request: whether it was there
  Returns  {'posted', number}, {'inbox', inputs, bytes}, or goes on
]]
for _, i in ipairs(inputs or {}) do
  local operation, name, value = words[i], words[i + 1], words[i + 2]
  local following, entries, used = string.match(call('HGET', record, '#b') or '1 0 0', '^(%d+) (%d+) (%d+)$')
  local removed, result, pieces = 0, {}, {}
  if operation == 'I' then
    local posted = name ~= '' and call('HGET', record, '#bq' .. name)
    if posted then return {'posted', string.match(posted, '^%d+')} end
    if entries + 1 > inbox_limit or used + #value > inbox_bytes then return {'inbox', entries, used} end
    pieces = {'#b' .. following, '!1' .. format('%015d', now_ms) .. ' ' .. value}
    following, entries, used = following + 1, entries + 1, used + #value
  end
  for number, request in string.gmatch(operation == 'T' and value or '', '(%d+):?(%x*)') do
    local input = call('HGET', record, '#b' .. number)
    result[#result + 1] = input and '1' or '0'
    if input then
      -- Without the mark with the time: '!1', 15 digits and a space.
      removed, entries, used = removed + 1, entries - 1, used - #input + 18
      pieces[#pieces + 1], pieces[#pieces + 2] = '#b' .. number, ''
      if request ~= '' then
        pieces[#pieces + 1], pieces[#pieces + 2] = '#bq' .. request, number .. ' ' .. format('%d', (version or 0) + 1)
      end
    end
  end
  for number, request in string.gmatch(operation == 'T' and name or '', '(%d+):(%x+)') do
    local posted = call('HGET', record, '#bq' .. request)
    -- Its input was served or withdrawn when the caller looked, and numbers are used once. If it was posted again since, it
    -- has another number.
    local known = posted and string.match(posted, '^%d+') == number
    result[#result + 1] = known and '1' or '0'
    if known then pieces[#pieces + 1], pieces[#pieces + 2] = '#bq' .. request, '' end
  end
  if operation == 'T' and removed == 0 and kind == 'post' then return {'posted', '0'} end
  -- A new encryption changes the size of an input, and does not count again.
  if removed > 0 then used = entries > 0 and math.max(used, 0) or 0 end
  pieces[#pieces + 1], pieces[#pieces + 2] = '#b', format('%d %d %d', following, entries, used)
  if operation == 'I' and name ~= '' then
    pieces[#pieces + 1], pieces[#pieces + 2] = '#bq' .. name, format('%d', following - 1)
  end
  for at = 1, #pieces, 2 do
    local field, content = pieces[at], pieces[at + 1]
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
  result[#result + 1] = format('%d,%d,%d', following, entries, used)
  results = (results == '' and '' or results .. ',') .. table.concat(result, ',')
end
