--[[
  The items that a change names, as they are, and whether what it expects of them is so. Nothing is written yet.
  Expects  item_window; words, first_step; results declared
  Returns  {'item', name, stamp} if one is not as expected, {'items', epoch, since, needed} if SQL knows one of these; or
           goes on
  Defines  held       what the window has of each, by name
           known      stamps of those that are put only if there is none
           begins     whether the change itself begins a layer, as a fork does
]]
local held, known, begins = {}, {}, false
do
  local names, fields = {}, {}
  for i = first_step, #words, 3 do
    local step, name, value = words[i], words[i + 1], words[i + 2]
    if step == 'V' or step == 'G' then
      -- What SQL said, if that is not overtaken: everything that changed below is in it, and nothing began anew.
      local of, archived, began, said = string.match(value, '^(%S+) (%d+) (%d*) (.*)$')
      if of == epoch and began == since and archived - needed >= 0 then
        if step == 'V' then proofs[name] = said elseif not top(name) then greatest[name] = said end
      end
    elseif step == 's' and name == '#items' then
      begins = true
    elseif string.find('pqnAPM', step, 1, true) and held[name] == nil then
      held[name] = false
      names[#names + 1], fields[#fields + 1] = name, ':' .. name
    end
  end
  if window and fields[1] then
    local found = call('HMGET', items, unpack(fields))
    for i, name in ipairs(names) do held[name] = found[i] end
  end
  local unknown = false
  for i = first_step, #words, 3 do
    local step, name, value = words[i], words[i + 1], words[i + 2]
    if step == 'A' or step == 'P' or step == 'M' or step == 'n' then
      local is = stamp(name, held[name])
      if not is then
        unknown = true
      elseif step == 'A' and is ~= '-' or step == 'P' and is == '-' or step == 'M' and is ~= value then
        return {'item', name, is}
      end
      known[name] = is
    end
  end
  if unknown then return {'items', epoch, since, format('%d', needed)} end
end
