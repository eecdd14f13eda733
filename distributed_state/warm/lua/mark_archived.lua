--[[
  Note that a record is archived up to a version: give it its TTL if that is the current one, drop archived messages
  beyond the recent ones, likewise items, and op ids that take more than one small field.
  KEYS  record  journal  meta  items
  ARGV  data_id  of the connection: see port/identities.py
        epoch, offset, event   of the journal entry of that version, or of a later one; if another entry is there, nothing is done
        version, ttl_ms, archived (messages below this number are in SQL), recent (how many stay)
  Returns {'ok'} | {'gone'} | {'epoch'} | {'other'}
]]
local record, journal, meta, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local data_id, epoch, offset, event, version, ttl_ms, archived, recent = unpack(ARGV)
local window_items = 64 -- @constant how many archived items stay
local window_bytes = 262144 -- @constant
local walked_entries = 10000 -- @constant how much of the log one call walks: a later one goes on there
local noted_collections = 256 -- @constant of how many the greatest key that left is noted
-- @include clock
-- @include epoch
-- @include same_data
if current ~= epoch then return {'epoch'} end
-- @include same_entry
local call = redis.call
local stored = call('HMGET', record, '#v', '#mn', '#md', '#ops', '#kv')
-- A record that has left Redis must not come back with only one field.
if not stored[1] then return {'gone'} end
version = version + 0

-- A TTL means that the whole record is archived. PEXPIRE works even at maxmemory, and allows Redis to evict the record.
local ops = stored[4]
if stored[1] - version == 0 then
  call('PEXPIRE', record, ttl_ms)
  if ops and #ops >= 64 then
    -- @include op_pieces
    local head = entry[2][2]
    -- @include entry_time
    -- All op ids are in SQL, as if the record had been hydrated now: see known_op.lua. They were committed before that
    -- entry, so its time is noted. With the present time, writers whose clocks are slightly behind would have to ask
    -- SQL.
    local before = format('%d', written_ms + 1)
    -- The note comes first: without it, writers would not look for dropped op ids in SQL.
    local kept = redis.pcall('HSET', record, '#ops', '@' .. before .. ';')
    if type(kept) == 'number' and pieces and pieces[1] then call('HDEL', record, unpack(pieces)) end
  end
end

local lowest, keep_from = (stored[3] or 0) + 0, math.min(archived, (stored[2] or 0) - recent)
local many = keep_from - lowest
if many > 0 then
  local names = {}
  if many > 5000 then
    -- There may be a large gap between an old message that is shown again and the next one: then only stored messages
    -- are checked.
    for _, name in ipairs(call('HKEYS', record)) do
      local number = string.match(name, '^#m(%d+)$')
      if number and number - keep_from < 0 then names[#names + 1] = name end
    end
  else
    for number = lowest, keep_from - 1 do names[#names + 1] = '#m' .. format('%d', number) end
  end
  for i = 1, #names, 5000 do call('HDEL', record, unpack(names, i, math.min(i + 4999, #names))) end
  redis.pcall('HSET', record, '#md', format('%d', keep_from))
end

-- Archived items leave the window, the oldest first; the newest ones stay.
local changed = stored[5]
if not changed then return {'ok'} end
local window = call('HMGET', items, '#e', '#n', '#d', '#c', '#b', '#f', '#u')
local whole = changed - version <= 0
if window[1] ~= epoch then
  -- A window of another epoch is not read, and its items are in SQL.
  if window[1] and whole then call('DEL', items) end
  return {'ok'}
end
-- A TTL means that the whole window is archived. PEXPIRE and PERSIST take no memory: after either even a full Redis
-- accepts the rest.
if whole then call('PEXPIRE', items, ttl_ms) else call('PERSIST', items) end
-- @include byte_order
local last, at, count, size, floor = window[2] + 0, window[3] + 0, window[4] + 0, window[5] + 0, window[6] + 0
local left, tops = {}, {}
-- Remove the item of this log entry from the window; false if it has to stay.
local function leave(number, logged)
  local of, bytes, name = string.match(logged, '^(%d+) (%d+) (.*)$')
  if of + 0 > version or count <= window_items and size <= window_bytes then return false end
  left[#left + 1], left[#left + 2] = number, ':' .. name
  count, size, floor = count - 1, size - bytes, math.max(floor, of + 0)
  local middle = string.find(name, '\0', 1, true)
  local collection, key = string.sub(name, 1, middle - 1), string.sub(name, middle + 1)
  if tops[collection] == nil then tops[collection] = call('HGET', items, '#h' .. collection) end
  local top = tops[collection]
  -- If the items below are unknown, this key may not be the greatest.
  if not top and not window[7] or top and (top == '-' or behind(key, string.sub(top, 2))) then tops[collection] = '=' .. key end
  return true
end
local walked, stays = math.min(last, at + walked_entries - 1), false
while not stays and at <= walked and (count > window_items or size > window_bytes) do
  local numbers = {}
  for number = at, math.min(at + 499, walked) do numbers[#numbers + 1] = 'k' .. format('%d', number) end
  for i, logged in ipairs(call('HMGET', items, unpack(numbers))) do
    -- The field is absent if the item was put again later.
    stays = logged and not leave(numbers[i], logged)
    if stays then break end
    at = at + 1
  end
end
local function drop(names)
  for i = 1, #names, 5000 do call('HDEL', items, unpack(names, i, math.min(i + 4999, #names))) end
end
if at - window[3] > 0 then
  local noted = {'#d', format('%d', at), '#c', format('%d', count), '#b', format('%d', size), '#f', format('%d', floor)}
  for collection, key in pairs(tops) do
    if key then noted[#noted + 1], noted[#noted + 2] = '#h' .. collection, key end
  end
  for i = 1, #noted, 5000 do call('HSET', items, unpack(noted, i, math.min(i + 4999, #noted))) end
  drop(left)
end
-- Besides the fields of items and seven fields of the head, there are the greatest keys. SQL is asked for keys that are
-- not noted.
if call('HLEN', items) - 2 * count - 7 > noted_collections then
  if not window[7] then call('HSET', items, '#u', '1') end
  local greatest = {}
  for _, name in ipairs(call('HKEYS', items)) do
    if string.sub(name, 1, 2) == '#h' then greatest[#greatest + 1] = name end
  end
  drop(greatest)
end
return {'ok'}
