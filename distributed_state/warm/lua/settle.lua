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
  -- @include items_left
end
return {'ok'}
