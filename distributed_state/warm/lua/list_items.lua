--[[
  Read the items of a record's collection that Redis has, in the order of their keys, including deleted ones.
  KEYS  record  items  meta
  ARGV  data_id of the connection: see port/identities.py
        ttl_ms  as in items.lua
        collection, prefix
        after, before    '=' and a key, which is left out; '' = no bound
        reverse          '1' = the greatest key first
        limit, bytes     the maximum number and total size; the first item comes even if it is larger
  Returns {'ok', epoch, version, since, whole, more, key, 'version ' and the frame, ...}
          whole '1' = SQL has no others up to the last; more '1' = there are more here, after the last
        | {'cold', epoch} | {'uninitialised'}
]]
local record, items, meta = KEYS[1], KEYS[2], KEYS[3]
local data_id, ttl_ms, collection, prefix, after, before, reverse, limit, bytes = unpack(ARGV, 1, 9)
limit, bytes = limit + 0, bytes + 0
local call = redis.call
-- @include clock
-- @include epoch
-- @include same_data
-- @include item_reading
-- @include byte_order
-- @include item_window
local keys, ranks, start = {}, {}, ':' .. collection .. '\0'
-- Numbers, each from six bytes of a key, are compared much faster than the key.
local function rank(key)
  local numbers = {}
  for at = 1, #key, 6 do
    local a, b, c, d, e, f = string.byte(key, at, at + 5)
    numbers[#numbers + 1] = ((((a * 256 + (b or 0)) * 256 + (c or 0)) * 256 + (d or 0)) * 256 + (e or 0)) * 256 + (f or 0)
  end
  return numbers
end
local function earlier(a, one, b)
  local other = ranks[b]
  for i = 1, math.min(#one, #other) do
    if one[i] ~= other[i] then return (one[i] < other[i]) ~= (reverse == '1') end
  end
  return (#a < #b) ~= (reverse == '1')
end
-- Insert a key in order, if it is one of the first `limit` keys. One more key is kept to show that there are more.
local function keep(key)
  local numbers = rank(key)
  local low, high = 1, #keys + 1
  if #keys > limit and not earlier(key, numbers, keys[#keys]) then return end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if earlier(key, numbers, keys[middle]) then high = middle else low = middle + 1 end
  end
  table.insert(keys, low, key)
  ranks[key] = numbers
  if #keys > limit + 1 then keys[#keys] = nil end
end
-- Bounded by the window, and by the limit of unarchived data of the partition.
for _, field in ipairs(window and call('HKEYS', items) or {}) do
  if string.sub(field, 1, #start) == start then
    local key = string.sub(field, #start + 1)
    if string.sub(key, 1, #prefix) == prefix and (after == '' or behind(key, string.sub(after, 2)))
      and (before == '' or behind(string.sub(before, 2), key)) then
      keep(key)
    end
  end
end
local highest = top(collection)
local whole = bare or highest == '-' or (not highest and window and not window[7])
if not whole and highest then
  -- All that is below is not behind this key: nothing of it, if the range begins there.
  local lowest = string.sub(highest, 2)
  whole = behind(prefix, lowest) or after ~= '' and not behind(lowest, string.sub(after, 2))
end
local answer, size, more = {}, 0, ''
for i, key in ipairs(keys) do
  if i > limit or i > 1 and size > bytes then
    more = '1'
    break
  end
  local held = string.match(call('HGET', items, start .. key), '^%d+ (.*)$')
  size = size + #held
  answer[#answer + 1] = key
  answer[#answer + 1] = held
end
-- From the greatest key on, the keys after that one come first: a full page of these is complete, and another page
-- follows.
local shown = #answer / 2
if not whole and highest and reverse == '1' and shown > 0 and (more == '1' or shown == limit)
  and behind(keys[shown], string.sub(highest, 2)) then
  whole, more = true, '1'
end
return {'ok', epoch, version, layer_from, whole and '1' or '', more, unpack(answer)}
