--[[
  Change one record: every check first, then every write, because a script does not roll back.
  KEYS  record  lock  hydration  journal  meta  channel  events  events_channel  lifetimes
        the last three only if there are steps 'e', 'E', 'x' or 'X'
  ARGV  epoch           '' = whichever it is
        replica, sequence, oldest, digest     the op id: see remembered() below
        lock_value            the lock's value as acquired, '' = none
        creation        '' = must exist, '*' = the id is fresh, '?' = as '', but '*' was sent before and may still arrive,
                        else the hydration token
        token, token_ms left behind when the record is absent
        expected        version, '' = any, '0' = absent
        deleted         what to do with a deleted record: 'refuse', 'create' (and nothing else), 'revive'
        kind, actor, owner, text     the owner is set if the record has none; kind '' = only say what would come of it
        own_channel     of the writer's link, if that is subscribed to the record's too, else ''
        publish_bytes   changes up to this size are published whole
        journal_entries, journal_bytes, record_bytes     limits
        window          seconds, how long op ids of other replicas are kept
        kept_events     how many lifecycle events stay in the stream
        since           ms of the server's clock: before then this op id was surely not applied
        expectations, then that many pairs: field, '=' .. raw value | '-'
        then triples: step, name, value (steps as in model.Op, and 'x': how long the record lives from now on, idle and
        at all in ms, 0 for no end; 'E', 'X': an event, a lifetime, only if the record begins with this)
  Returns {'ok', version, epoch, first message's number, results, journal offset, time in ms}
          no time if this was applied before; of a 'cold' one the token is '' if Redis is too full for it: then nothing
          is written, and whether it was applied before SQL knows
        | {'uninitialised'} | {'epoch', epoch} | {'cold', epoch, token} | {'deleted', version} | {'exists', version}
        | {'fenced', holder} | {'locked', holder} | {'conflict', version, raw value | false ...}
        | {'swap', field, raw value} | {'backpressure', entries, bytes} | {'toolarge', bytes}
        | {'forgotten'} | {'misused', version}
        | {'unsure', ms, epoch}   if it was applied, then before the record came back from SQL, which knows
        | {'late', ms, epoch}     op ids are not kept for that long
        both with the server's clock; nothing was changed
]]
local record, lock, hydration, journal, meta, channel, events, events_channel, lifetimes = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local epoch, replica, sequence, oldest, digest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local lock_value, creation, token, token_ms, expected, deleted = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local kind, actor, owner, text, own_channel = ARGV[12], ARGV[13], ARGV[14], ARGV[15], ARGV[16]
local publish_bytes, journal_entries, journal_bytes = tonumber(ARGV[17]), tonumber(ARGV[18]), tonumber(ARGV[19])
local record_bytes, window, kept_events = tonumber(ARGV[20]), tonumber(ARGV[21]), tonumber(ARGV[22])
local since, expectations = tonumber(ARGV[23]), tonumber(ARGV[24])
local first_step = 25 + 2 * expectations
local call = redis.call

-- @include clock
local place = call('HMGET', meta, 'epoch', 'offset', 'bytes', 'archived_offset', 'archived_bytes', 'event', 'fresh')
if not place[1] then return {'uninitialised'} end
if epoch ~= '' and epoch ~= place[1] then return {'epoch', place[1]} end
epoch = place[1]

local head = call('HMGET', record, '#v', '#ops', '#deleted', '#mn', '#size', '#owner', '#lifetime')
local version = head[1]

-- Op ids are kept per replica as 'replica oldest time sequence:version:digest:first,results ...', joined by ';'. A replica
-- says with each commit which of its sequences are still unanswered. Those before are dropped and refused if they come
-- late; with many in flight they are dropped in larger steps, so that the cost stays flat. Before the groups stands '@ms;'
-- if the record came back from SQL then: the op ids of what was committed before are in SQL, all of them, and not here.
local remembered, mine, mine_oldest, hydrated = '', '', ARGV[4], 0
if head[2] then
  local came, groups = string.match(head[2], '^@(%d+);(.*)$')
  if came then
    hydrated = tonumber(came)
    if now_ms - hydrated <= window * 1000 then remembered = '@' .. came .. ';' end
  end
  for group in string.gmatch(groups or head[2], '[^;]+') do
    local who, first, time, rest = string.match(group, '^(%S+) (%d+) (%d+)(.*)$')
    if who == replica then
      if sequence < tonumber(first) then return {'forgotten'} end
      local at = string.find(rest, ' ' .. ARGV[3] .. ':', 1, true)
      if at then
        local v, d, message, results = string.match(rest, '^ %d+:(%d+):(%w*):([^, ]*),?(%S*)', at)
        if d ~= digest then return {'misused', v} end
        return {'ok', v, epoch, message, results, place[2]}
      end
      if oldest < tonumber(first) or #rest >= 200 and oldest - first <= 64 then
        mine, mine_oldest = rest, first
      elseif oldest < sequence then
        for op, s in string.gmatch(rest, '( (%d+):%S+)') do
          if tonumber(s) >= oldest then mine = mine .. op end
        end
      end
    elseif time + window >= now[1] + 0 then
      remembered = remembered .. group .. ';'
    end
  end
end
-- It is not among them. That says it was not applied since `since`, as long as nothing since then can have been dropped.
if now_ms - since > window * 1000 then return {'late', whole(now_ms), epoch} end
if since < hydrated then return {'unsure', whole(now_ms), epoch} end

-- A '*' needs no hydration token, so nothing else would stop one that arrives after its repetition was applied, archived
-- and evicted. The repetition leaves word where nothing is evicted, before it is applied or answered with what SQL knows.
if creation == '?' then
  creation = ''
  -- Refused at maxmemory, and it may have been applied before: that must not look as if it was not.
  if type(redis.pcall('HSET', meta, 'fresh', whole(now_ms))) == 'table' then return {'cold', epoch, ''} end
elseif creation == '*' and since <= tonumber(place[7] or '0') then
  creation = ''
end

if not version and creation ~= '*' and (creation == '' or call('GET', hydration) ~= creation) then
  -- @include hydration_token
  return {'cold', epoch, left}
end

local holder = call('GET', lock)
if lock_value ~= '' then
  if holder ~= lock_value then return {'fenced', holder or ''} end
elseif holder and string.byte(holder) == 120 then -- x: exclusive
  return {'locked', holder}
end

if head[3] and deleted == 'refuse' then return {'deleted', version} end
if version and not head[3] and deleted == 'create' then return {'exists', version} end

local mismatch = expected ~= '' and expected ~= (version or '0')
local found = {}
if expectations > 0 then
  local names = {}
  for i = 1, expectations do names[i] = ARGV[23 + 2 * i] end
  found = call('HMGET', record, unpack(names))
  for i = 1, expectations do
    local wanted = ARGV[24 + 2 * i]
    if found[i] then mismatch = mismatch or wanted ~= '=' .. found[i] else mismatch = mismatch or wanted ~= '-' end
  end
end
if mismatch then return {'conflict', version or '0', unpack(found)} end

-- @include backpressure

-- Increments: plain integers of at most 15 digits are exact in Lua; anything else is the caller's to swap.
local sums = {}
local size = tonumber(head[5] or '0')
local growth, cleared = 0, false
for i = first_step, #ARGV, 3 do
  local step, name, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if step == 'i' then
    local current = not cleared and call('HGET', record, name) or '0'
    if #current > 15 or #value > 15 or not string.match(current, '^-?%d+$') or not string.match(value, '^-?%d+$') then
      return {'swap', name, current}
    end
    value = whole(tonumber(current) + tonumber(value))
    sums[name] = value
  end
  if step == 'c' then
    cleared, growth = true, -size
  elseif (step == 's' or step == 'i' or step == 'd') and string.byte(name) ~= 35 then
    local before = cleared and 0 or call('HSTRLEN', record, name)
    if before > 0 then growth = growth - before - #name end
    if step ~= 'd' then growth = growth + #name + #value end
  end
end
if growth > 0 and size + growth > record_bytes then return {'toolarge', whole(size + growth)} end

if kind == '' then return {'ok', version or '0', epoch, head[4] or '0', '', place[2]} end

-- From here on only writes.
local first_message = head[4] or '0'
local next_message, last_message = first_message + 0, first_message
local fields, gone, change, results = {}, {}, {}, ''
local event, types, payloads = tonumber(place[6] or '0'), {}, {}
local lives = head[7]
for i = first_step, #ARGV, 3 do
  local step, name, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if (step == 'E' or step == 'X') and (not version or head[3]) then step = string.lower(step) end
  if step == 's' or step == 'i' then
    if step == 'i' then
      step, value = 's', sums[name]
      results = results == '' and value or results .. ',' .. value
    end
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  elseif step == 'd' then
    gone[#gone + 1] = name
  elseif step == 'm' then
    name, value = last_message, '!' .. whole(now_ms) .. ' ' .. value -- as in values/field_ttl.py: when it was said
    fields[#fields + 1] = '#m' .. name
    fields[#fields + 1] = value
    next_message = next_message + 1
    last_message = whole(next_message)
  elseif step == 'c' or step == 'w' then
    -- Bounded by the record's own size limits.
    for _, key in ipairs(call('HKEYS', record)) do
      if step == 'c' and string.byte(key) ~= 35 or step == 'w' and string.match(key, '^#m%d+$') then
        gone[#gone + 1] = key
      end
    end
    if step == 'w' then
      gone[#gone + 1] = '#segments'
      fields[#fields + 1] = '#ms'
      fields[#fields + 1] = first_message
      value = first_message
    end
  elseif step == 'e' then
    types[#types + 1], payloads[#payloads + 1] = name, value
    name = whole(event + #types) .. ' ' .. name .. ' ' .. text
  elseif step == 'x' then
    local idle, left, limit, look = tonumber(name), tonumber(value), 0, nil
    if left > 0 then
      limit = now_ms + left
      look = limit
    end
    if idle > 0 then look = math.min(look or math.huge, now_ms + idle) end
    if look then
      lives = true
      step, name, value = 's', '#lifetime', name .. ' ' .. whole(limit)
      fields[#fields + 1] = name
      fields[#fields + 1] = value
      call('ZADD', lifetimes, whole(look), text)
    else
      call('ZREM', lifetimes, text)
    end
  end
  if step ~= 'E' and step ~= 'x' and step ~= 'X' then
    change[#change + 1] = step .. #name .. ':' .. #value .. ':' .. name .. value
  end
end
if owner ~= '' and not head[6] then
  fields[#fields + 1] = '#owner'
  fields[#fields + 1] = owner
  change[#change + 1] = 's6:' .. #owner .. ':#owner' .. owner
end

for i = 1, #gone, 7000 do call('HDEL', record, unpack(gone, i, math.min(i + 6999, #gone))) end
version = whole((version or 0) + 1)
if last_message ~= first_message then
  fields[#fields + 1] = '#mn'
  fields[#fields + 1] = last_message
end
local n = #fields
fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = '#v', version, '#size', growth == 0 and head[5] or whole(size + growth)
fields[n + 5], fields[n + 6] = '#ops', remembered .. replica .. ' ' .. mine_oldest .. ' ' .. now[1] .. mine .. ' '
  .. ARGV[3] .. ':' .. version .. ':' .. digest .. ':' .. first_message .. ',' .. results
-- When it was last committed, for who looks whether it was idle too long: nothing else is noted of that on the way.
if lives then
  fields[n + 7], fields[n + 8] = '#t', whole(now_ms)
end
if n <= 7000 then
  call('HSET', record, unpack(fields))
else
  for i = 1, #fields, 7000 do call('HSET', record, unpack(fields, i, math.min(i + 6999, #fields))) end
end
if not head[1] then
  call('DEL', hydration)
else
  call('PERSIST', record)
end

local data = change[2] and table.concat(change) or change[1]
local token_held = lock_value ~= '' and string.match(lock_value, '^%a(%d+)') or '0'
local op = replica .. '.' .. ARGV[3]
local entry_id = op .. '.' .. digest
-- @include journal
if types[1] then
  local subject = text
  -- @include events
end
-- The writer needs no message. Whether it listens only the server knows: its link may have ended without a word.
local listening = call('PUBSUB', 'SHARDNUMSUB', channel, own_channel)
if listening[2] > listening[4] then
  local small = #data <= publish_bytes
  call('SPUBLISH', channel, epoch .. ' ' .. version .. ' ' .. replica .. ' ' .. (small and '+' or '-') .. (small and data or ''))
end
return {'ok', version, epoch, first_message, results, offset, whole(now_ms)}
