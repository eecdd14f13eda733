--[[
  Let items leave the window that are archived, the oldest first, beyond the newest ones.
  Expects  call, format, items, epoch, version (up to which it is archived, a number), ttl_ms, changed (when an item was
           put or deleted last)
  Defines  nothing
]]
local window_items = 64 -- @constant
local window_bytes = 262144 -- @constant
local window = call('HMGET', items, '#e', '#n', '#d', '#c', '#b', '#f', '#u')
local whole = changed + 0 <= version
-- Of another life, which is in SQL: nobody reads it.
if window[1] and window[1] ~= epoch and whole then call('DEL', items) end
if window[1] == epoch then
  -- A TTL says that all of it is archived. Either takes no memory: after it a full Redis lets the rest be done.
  if whole then call('PEXPIRE', items, ttl_ms) else call('PERSIST', items) end
  local last, at, count, size, floor = window[2] + 0, window[3] + 0, window[4] + 0, window[5] + 0, window[6] + 0
  local left, tops, stop = {}, {}, false
  while not stop and at <= last and (count > window_items or size > window_bytes) do
    local numbers = {}
    for number = at, math.min(at + 499, last) do numbers[#numbers + 1] = 'k' .. format('%d', number) end
    for i, entry in ipairs(call('HMGET', items, unpack(numbers))) do
      -- One is missing where its item was put anew since.
      if entry then
        local of, bytes, name = string.match(entry, '^(%d+) (%d+) (.*)$')
        if of + 0 > version or count <= window_items and size <= window_bytes then
          stop = true
          break
        end
        left[#left + 1], left[#left + 2] = numbers[i], ':' .. name
        count, size, floor = count - 1, size - bytes, math.max(floor, of + 0)
        local middle = string.find(name, '\0', 1, true)
        local collection, key = string.sub(name, 1, middle - 1), string.sub(name, middle + 1)
        if tops[collection] == nil then tops[collection] = call('HGET', items, '#h' .. collection) end
        local top = tops[collection]
        -- Where it is not known what lies below, this may not be the greatest.
        if not top and not window[7] or top and (top == '-' or behind(key, string.sub(top, 2))) then
          tops[collection] = '=' .. key
        end
      end
      at = at + 1
    end
  end
  if at > window[3] + 0 then
    local noted = {'#d', format('%d', at), '#c', format('%d', count), '#b', format('%d', size), '#f', format('%d', floor)}
    for collection, key in pairs(tops) do
      if key then noted[#noted + 1], noted[#noted + 2] = '#h' .. collection, key end
    end
    call('HSET', items, unpack(noted))
    for i = 1, #left, 5000 do call('HDEL', items, unpack(left, i, math.min(i + 4999, #left))) end
  end
end
