--[[
  Whether version and fields are as the caller expects them. The value of a pair is '=' .. raw value or '-' (absent) for a
  compare-and-swap of bytes; and for a user's precondition, to which a field past its deadline is absent, '+' .. raw value,
  '+' (present, with any value) or '!' (absent).
  Expects  clock; call, words, record, version (false = absent), expected, expectations
  Returns  {'conflict', version, raw value | '+' | false ...}, or goes on
]]
local mismatch = expected ~= '' and expected ~= (version or '0')
local found
if expectations ~= '0' then
  found = {}
  -- The pairs begin at argument 18, so pair j is words[16 + 2 * j] and words[17 + 2 * j].
  -- In parts: Lua passes some thousands of arguments at most.
  for i = 1, expectations, 1000 do
    local names = {}
    for j = i, math.min(i + 999, expectations) do names[j - i + 1] = words[16 + 2 * j] end
    for j, raw in ipairs(call('HMGET', record, unpack(names))) do found[i + j - 1] = raw end
  end
  for i = 1, expectations do
    local wanted, stored = words[17 + 2 * i], found[i]
    local way = string.byte(wanted)
    if way == 43 or way == 33 then -- + !
      local ends = stored and string.match(stored, '^!(%d+) ')
      if ends and ends + 0 <= now_ms then stored, found[i] = false, false end
      -- Only presence was requested, so a large value is not sent back.
      if stored and (way == 33 or wanted == '+') then found[i] = '+' end
      if way == 33 or not stored then
        mismatch = mismatch or way == 43 or stored
      else
        mismatch = mismatch or wanted ~= '+' and wanted ~= '+' .. stored
      end
    elseif stored then
      mismatch = mismatch or wanted ~= '=' .. stored
    else
      mismatch = mismatch or wanted ~= '-'
    end
  end
end
if mismatch then return {'conflict', version or '0', unpack(found or {}, 1, math.min(expectations, 7000))} end
