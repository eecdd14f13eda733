--[[
  The effects of a change's operations, with the last checks; nothing is written yet. 's' sets a field, 'd' deletes it,
  'i' adds to it; 'm' appends a message, or with a number as its name copies one; 'c' clears the fields, with the
  name '##' the tags and the inbox, too; 'w' hides all messages; 'l' labels the version; 'e' writes a lifecycle event; 'x' lets the record
  end after name ms without a commit, or value ms from now on, 0 = never. 'E' and 'X' are 'e' and 'x' only if the
  record begins with this change. 'z' ends the output of a turn. 'r' notes an answered request with the new version; 'I'
  and 'W' add to the inbox, and 'T' takes some out: see inbox.lua. 'D' says when the session is served: see schedule.lua.
  Expects  clock; call, words, first_operation, record, head, version (false = absent), text, meta, items, item_operation,
           record_bytes
  Defines  fields, n     names and values to set, and how many; those of '#v' and '#ops' come first and are still empty
           gone          fields to delete, nil = none
           change, changes     the operations as the journal has them: the only one, and all if there are several
           public        the published form if some are on items, of which it has only the names; nil = as in the journal
           size, growth  bytes of the record's fields, and how many more there will be
           first_message, last_message    the number of the next message, before and after the change
           results       sums of increments, and whether each 'n' puts its item
           has_lifetime  whether the record has one
           next_look     when the reaper checks its lifetime next (math.huge = never, nil = unchanged)
           types, payloads     of lifecycle events, nil = none
           event, last_event, interests    for events.lua, if there are any
           inputs        where in words the operations on the inbox are, nil = none: see inbox.lua
           scheduled     where the operation on the schedule is, nil = none: see schedule.lua
           ends_schedule whether the inbox is cleared, and with it the schedule
           ends_output   number, tag and content of the end of a turn's output: see output_entry.lua
           flags         '': those of the answer
  Returns  {'swap', field, raw value, ...}, {'tags', how many}, {'toolarge', bytes}, or goes on
]]
local size, growth, cleared = head[5] or '0', 0, false
local first_message = head[4] or '0'
local last_message, results, has_lifetime = first_message, '', head[6]
local several -- the results as a list once there are two: joining them one by one would copy all earlier ones each time
local gone, event, last_event, interests, types, payloads, next_look
local change, changes -- a table for one operation would cost more than the operation
local public = items and {}
local exact -- a function, made at the first increment
local ends_output -- by 'z'
local inputs, scheduled, ends_schedule
local tagged, tagging -- how many more tags there will be, and whether one is new
-- With room for one operation: a table that grows costs more than the operation.
local fields, n, flags = {'#v', '', '#ops', '', '', '', '', ''}, 4, ''
for i = first_operation, #words, 3 do
  local operation, name, value = words[i], words[i + 1], words[i + 2]
  local result
  if (operation == 'E' or operation == 'X') and (not version or head[3]) then operation = string.lower(operation) end
  if operation == 'r' then operation, value = 's', '!1' .. format('%015d', (version or 0) + 1) .. ' ' .. value end
  if operation == 's' or operation == 'i' or operation == 'd' then
    local counts, held, before = string.byte(name) ~= 35, nil, 0
    if i == first_operation then
      held = head[7]
      before = held and #held or 0
    elseif not cleared and operation == 'i' then
      held = call('HGET', record, name)
      before = held and #held or 0
    elseif not cleared and counts then
      before = call('HSTRLEN', record, name)
    end
    if not counts and string.byte(name, 2) == 35 and call('HEXISTS', record, name) == (operation == 's' and 0 or 1) then -- ##
      tagged, tagging = (tagged or 0) + (operation == 's' and 1 or -1), tagging or operation == 's'
    end
    if operation == 'i' then
      -- Plain integers of at most 15 digits are exact in Lua; other values are computed by the caller, who swaps them
      -- in.
      exact = exact or function(held, value)
        return #held <= 15 and #value <= 15 and string.find(held, '^-?%d+$') and string.find(value, '^-?%d+$')
      end
      held = held or '0'
      if not exact(held, value) then
        -- Other such fields are returned too, to save a round trip for each. Long values cannot be numbers with a
        -- deadline.
        local others = {}
        for j = i + 3, cleared and 0 or #words, 3 do
          local other = words[j] == 'i' and call('HGET', record, words[j + 1])
          if other and #other <= 64 and not exact(other, words[j + 2]) then
            others[#others + 1], others[#others + 2] = words[j + 1], other
          end
        end
        return {'swap', name, held, unpack(others, 1, math.min(#others, 7000))}
      end
      operation, value = 's', format('%d', held + value)
      result = value
    end
    if counts and before > 0 then growth = growth - before - #name end
    if operation == 'd' then
      gone = gone or {}
      gone[#gone + 1] = name
    else
      if counts then growth = growth + #name + #value end
      n = n + 2
      fields[n - 1], fields[n] = name, value
    end
  elseif operation == 'm' then
    if name == '' then -- else it is a copy, with the number and the time that it had
      name, value = last_message, '!' .. format('%d', now_ms) .. ' ' .. value -- the time, as in values/field_ttl.py
    end
    n = n + 2
    fields[n - 1], fields[n] = '#m' .. name, value
    last_message = format('%d', name + 1)
  elseif operation == 'c' or operation == 'w' then
    gone = gone or {}
    -- Bounded by the record's own size limits.
    for _, key in ipairs(call('HKEYS', record)) do
      local two = string.sub(key, 1, 2)
      if operation == 'c' and (string.byte(key) ~= 35 or name == '##' and (two == name or two == '#b'))
        or operation == 'w' and string.match(key, '^#m%d+$') then
        gone[#gone + 1] = key
      end
    end
    if operation == 'c' then
      cleared, growth, ends_schedule = true, -size, name == '##'
    else
      gone[#gone + 1] = '#segments'
      n = n + 2
      fields[n - 1], fields[n] = '#ms', first_message
      value = first_message
    end
  elseif operation == 'e' then
    types, payloads = types or {}, payloads or {}
    if not event then event, interests = unpack(call('HMGET', meta, 'event', 'interests')) end
    event = (event or 0) + 0
    types[#types + 1], payloads[#payloads + 1] = name, value
    last_event = format('%d', event + #types)
    name = last_event .. ' ' .. name .. ' ' .. text
  elseif operation == 'x' then
    local idle, left, limit = name + 0, value + 0, 0
    next_look = math.huge
    if left > 0 then
      limit = now_ms + left
      next_look = limit
    end
    if idle > 0 then next_look = math.min(next_look, now_ms + idle) end
    if next_look < math.huge then
      has_lifetime = true
      operation, name, value = 's', '#lifetime', name .. ' ' .. format('%d', limit)
      n = n + 2
      fields[n - 1], fields[n] = name, value
    end
  elseif operation == 'I' or operation == 'T' or operation == 'W' then
    inputs = inputs or {}
    inputs[#inputs + 1], operation = i, nil
  elseif operation == 'D' then
    scheduled, operation = i, nil
  elseif operation == 'z' then
    ends_output = {name, string.match(value, '^(%S+) (.*)$')}
  elseif items then
    operation, name, value, result = item_operation(operation, name, value)
  end
  if result then
    if several then several[#several + 1] = result elseif results == '' then results = result else several = {results, result} end
  end
  if operation and operation ~= 'E' and operation ~= 'x' and operation ~= 'X' and operation ~= 'z' then
    local piece = operation .. format('%d:%d:', #name, #value) .. name .. value
    if public then public[#public + 1] = operation == 'p' and 'p' .. #name .. ':0:' .. name or piece end
    if not change then
      change = piece
    else
      changes = changes or {change}
      changes[#changes + 1] = piece
    end
  end
end
-- A record with fewer fields has fewer tags. Otherwise tags are counted, bounded by the record's own size limits.
if tagging and call('HLEN', record) + tagged > 256 then
  for _, key in ipairs(call('HKEYS', record)) do
    if string.sub(key, 1, 2) == '##' then tagged = tagged + 1 end
  end
  if tagged > 256 then return {'tags', format('%d', tagged)} end
end
if growth > 0 and size + growth > record_bytes then return {'toolarge', format('%d', size + growth)} end
if several then results = table.concat(several, ',') end
