--[[
  Note that a record is archived up to a version: give it its TTL if that is the current one, drop archived messages
  beyond the recent ones, likewise items, and op ids that take more than one small field.
  KEYS  record  journal  meta  items
  ARGV  life    of the connection: see port/lives.py
        epoch, offset, event   of a journal entry at or behind its own; with another one there nothing is done
        version, ttl_ms, archived (messages below this number are in SQL), recent (how many stay)
  Returns {'ok'} | {'gone'} | {'epoch'} | {'other'}
]]
local record, journal, meta, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local life, epoch, offset, event = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local version, ttl_ms, archived, recent = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local window_items = 64 -- @constant how many archived items stay
local window_bytes = 262144 -- @constant
local walked_entries = 10000 -- @constant how much of the log one settling walks: a later one goes on there
local noted_collections = 256 -- @constant of how many the greatest key that left is noted
-- @include clock
-- @include epoch
-- @include same_data
if current ~= epoch then return {'epoch'} end
-- @include same_entry
local head = redis.call('HMGET', record, '#v', '#mn', '#md', '#ops', '#kv')
-- A record that is gone must not come back as a ghost of one field.
if not head[1] then return {'gone'} end
-- A TTL says that the record is archived whole. PEXPIRE is carried out even at maxmemory, and lets Redis evict.
if tonumber(head[1]) == version then
  redis.call('PEXPIRE', record, ttl_ms)
  local ops = head[4]
  if ops and #ops >= 64 then
    -- @include op_pieces
    -- All of them are in SQL, as if the record came back from there: see commit.lua. What it holds was committed before
    -- that entry, whose time leaves alone who writes now, by a clock that may be a little behind.
    local seconds, micros = string.match(entry[2][2], '^[^\n]*\n[^\n]*\n[^\n]*\n(%d+) (%d+)\n')
    local before = format('%d', seconds * 1000 + micros / 1000 + 1)
    -- First the note: without it, what is dropped would not be looked for in SQL.
    local kept = redis.pcall('HSET', record, '#ops', '@' .. before .. ';')
    if type(kept) == 'number' and pieces and pieces[1] then redis.call('HDEL', record, unpack(pieces)) end
  end
end
local before = tonumber(head[3] or '0')
local lowest, keep_from = before, math.min(archived, tonumber(head[2] or '0') - recent)
-- Between an old message that is shown again and the next one may lie any number of numbers: then only what is there.
if keep_from - lowest > 5000 then
  local names = {}
  for _, name in ipairs(redis.call('HKEYS', record)) do
    local number = tonumber(string.match(name, '^#m(%d+)$'))
    if number and number < keep_from then names[#names + 1] = name end
  end
  for i = 1, #names, 5000 do redis.call('HDEL', record, unpack(names, i, math.min(i + 4999, #names))) end
  lowest = keep_from
end
while lowest < keep_from do
  local names, stop = {}, math.min(keep_from, lowest + 5000)
  for number = lowest, stop - 1 do names[#names + 1] = '#m' .. string.format('%d', number) end
  redis.call('HDEL', record, unpack(names))
  lowest = stop
end
if lowest > before then redis.pcall('HSET', record, '#md', string.format('%d', lowest)) end
local changed = head[5]
if changed then
  local call = redis.call
  -- @include byte_order
  -- Items leave the window that are archived, the oldest first, beyond the newest ones.
  local window = call('HMGET', items, '#e', '#n', '#d', '#c', '#b', '#f', '#u')
  local whole = changed + 0 <= version
  -- Of another life, which is in SQL: nobody reads it.
  if window[1] and window[1] ~= epoch and whole then call('DEL', items) end
  if window[1] == epoch then
    -- A TTL says that all of it is archived. Either takes no memory: after it a full Redis lets the rest be done.
    if whole then call('PEXPIRE', items, ttl_ms) else call('PERSIST', items) end
    local last, at, count, size, floor = window[2] + 0, window[3] + 0, window[4] + 0, window[5] + 0, window[6] + 0
    local left, tops, stop = {}, {}, false
    local walked = math.min(last, at + walked_entries - 1)
    while not stop and at <= walked and (count > window_items or size > window_bytes) do
      local numbers = {}
      for number = at, math.min(at + 499, walked) do numbers[#numbers + 1] = 'k' .. format('%d', number) end
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
      for i = 1, #noted, 5000 do call('HSET', items, unpack(noted, i, math.min(i + 4999, #noted))) end
      for i = 1, #left, 5000 do call('HDEL', items, unpack(left, i, math.min(i + 4999, #left))) end
    end
    -- Beside what each item has, and seven fields of the head. Of a collection of which it is not noted SQL is asked.
    if call('HLEN', items) - 2 * count - 7 > noted_collections then
      if not window[7] then call('HSET', items, '#u', '1') end
      local dropped = {}
      for _, name in ipairs(call('HKEYS', items)) do
        if string.sub(name, 1, 2) == '#h' then dropped[#dropped + 1] = name end
      end
      for i = 1, #dropped, 5000 do call('HDEL', items, unpack(dropped, i, math.min(i + 4999, #dropped))) end
    end
  end
end
return {'ok'}
