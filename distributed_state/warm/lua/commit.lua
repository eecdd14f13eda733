--[[
  Change one record: every check first, then every write, because a script does not roll back.
  KEYS  record  lock  hydration  journal  meta  channel  events  events_channel  lifetimes  items
        the last five only if there are steps 'e', 'E', 'x' or 'X', or of items; lifetimes only for 'x' or 'X', or those
  ARGV  life            of the connection: see port/lives.py
        replica         part of the op id: see below
        epoch           '' = whichever it is
        sequence, oldest, digest     the rest of the op id
        since           ms of the server's clock: before then this op id was surely not applied
        lock_value      the lock's value as acquired, '' = none
        creation        '' = must exist, '*' = the id is fresh, '?' = as '', but '*' was sent before and may still arrive,
                        '+' = may be new: it is begun if its id is not known here, else the hydration token
        expected        version, '' = any, '0' = absent
        deleted         what to do with a deleted record: 'refuse', 'create' (and nothing else), 'begin' or 'revive' it (the same here)
        kind, actor, owner, text     the owner is set if the record has none; kind '' = only say what would come of it
        own_channel     of the writer's link, if that is subscribed to the record's too, else ''
        expectations, then that many pairs: field, '=' .. raw value | '-', and of a user, for whom a field past its
                        deadline is absent, '+' .. raw value | '+' (it is there) | '!' (it is not)
        then triples: step, name, value (steps as in model.Op, and 'x': how long the record lives from now on, idle and
        at all in ms, 0 for no end; 'E', 'X': an event, a lifetime, only if the record begins with this)
        of items, by name: 'p' put, 'q' delete, 'n' put if there is none, else pass over; 'A', 'P', 'M': it must be absent,
        present, of this version; 'V', 'G': of an item and of a collection what SQL was seen to have, 'epoch version'
        and the item's version, the greatest key with '=' before it, or '-'; 'y': a new layer begins, below which lie the
        items of this version, '0' = none: see item_window.lua
  Returns 'ok version epoch first_message results offset seconds microseconds archived_offset said'
          one text, because each element of an answer costs as much as a step: the first message's number, the sums of
          increments joined by ',' (among them of each 'n' 1 or 0, whether it was put), the journal's offset, the
          server's time; how far the journal is archived; what else
          its writer needs to know the entry: 'o' the owner was set, 'b' a deleted record began anew, 'y' a layer of
          items began, 'i' the record's first items, 'e' and the number of the first event. From the time on all is
          missing if it was applied before
        | {'uninitialised'} | {'epoch', epoch} | {'cold', epoch, token} | {'deleted', version} | {'exists', version}
        | {'fenced', holder} | {'locked', holder} | {'conflict', version, raw value | '+' | false ...}
        | {'swap', field, raw value, ...} | {'backpressure', entries, bytes} | {'toolarge', bytes} | {'tags', how many}
        | {'forgotten'} | {'misused', version} | {'item', name, version or '-'}
        | {'items', epoch, needed}   what SQL has of the items is to be read, and sent along
          of a 'cold' one the token is '' if Redis is too full for it: then nothing is written, and whether it was
          applied before SQL knows
        | {'unsure', ms, epoch}   if it was applied, then before the record came back from SQL, which knows
        | {'late', ms, epoch}     op ids are not kept for that long
        both with the server's clock; nothing was changed
]]
local record, lock, hydration, journal, meta, channel, events, events_channel, lifetimes, items = unpack(KEYS)
-- All are texts. Arithmetic makes a number of one where it is needed, which costs half of what tonumber() does.
local life, replica, epoch, sequence, oldest, digest, since, lock_value, creation, expected, deleted, kind, actor, owner, text,
  own_channel, expectations = unpack(ARGV, 1, 17)
local first_step = expectations == '0' and 18 or 18 + 2 * expectations
local call, words = redis.call, ARGV
-- Of the store's settings: arguments would cost more than the steps. Here stand the defaults.
local publish_bytes = 4096 -- @constant changes up to this size are published whole
local journal_entries = 100000 -- @constant
local journal_bytes = 67108864 -- @constant
local record_bytes = 33554432 -- @constant
local window_ms = 300000 -- @constant how long op ids of other replicas are kept
local kept_events = 10000 -- @constant how many lifecycle events stay in the stream

-- @include clock
local written = call('HGET', meta, 'journal')
-- @include written
-- @include same_data
-- @include journal_end
if not current then return {'uninitialised'} end
local read_under = epoch
epoch = current

-- The first step's field comes along: most changes are of one, and a call costs as much as two or three fields.
local head = call('HMGET', record, '#v', '#ops', '#deleted', '#mn', '#size', '#lifetime', words[first_step + 1] or '')
local version = head[1]

-- Op ids are kept per replica as 'replica oldest time sequence:version:digest:first,results ...', joined by ';'. A replica
-- says with each commit which of its sequences are still unanswered. Those before are dropped and refused if they come
-- late; with many in flight they are dropped in larger steps, so that the cost stays flat. Before the groups stands '@ms;'
-- if the record came back from SQL then, or was archived up to then with more op ids than fit into one small field: the
-- op ids of what was committed before are in SQL, all of them, and not here.
local ops, remembered, mine, mine_oldest, hydrated = head[2], '', '', oldest, 0
-- @include op_pieces
if ops then
  if string.byte(ops) == 64 then -- @
    local came, groups = string.match(ops, '^@(%d+);(.*)$')
    hydrated, ops = came + 0, groups
    if now_ms - hydrated <= window_ms then remembered = '@' .. came .. ';' end
  end
  -- Mostly there is one, of this replica and answered, and nothing to look at.
  local only, last = string.match(ops, '^(%S+) %d+ %d+ (%d+):[^ ;]*$')
  if only ~= replica or oldest - last <= 0 then
    for who, first, time, rest in string.gmatch(ops, '([^; ]+) (%d+) (%d+)([^;]*)') do
      if who == replica then
        local dropped = oldest - first
        -- A sequence is never before the oldest that is said with it.
        if dropped < 0 and sequence - first < 0 then return {'forgotten'} end
        local at = string.find(rest, ' ' .. sequence .. ':', 1, true)
        if at then
          local v, d, message, results = string.match(rest, '^ %d+:(%d+):(%w*):([^, ]*),?(%S*)', at)
          if d ~= digest then return {'misused', v} end
          return 'ok ' .. v .. ' ' .. epoch .. ' ' .. message .. ' ' .. results .. ' ' .. offset
        end
        if dropped < 0 or #rest >= 200 and dropped <= 64 then
          mine, mine_oldest = rest, first
        else
          local left = {}
          for op, s in string.gmatch(rest, '( (%d+):%S+)') do
            if s - oldest >= 0 then left[#left + 1] = op end
          end
          mine = table.concat(left)
        end
      elseif time * 1000 + window_ms >= now_ms - 1000 then
        remembered = remembered .. who .. ' ' .. first .. ' ' .. time .. rest .. ';'
      end
    end
  end
end
-- It is not among them. That says it was not applied since `since`, as long as nothing since then can have been dropped.
since = since + 0
if now_ms - since > window_ms then return {'late', format('%d', now_ms), epoch} end
if since < hydrated then return {'unsure', format('%d', now_ms), epoch} end

-- A '*' needs no hydration token, so nothing else would stop one that arrives after its repetition was applied, archived
-- and evicted. The repetition leaves word where nothing is evicted, before it is applied or answered with what SQL knows.
if creation == '?' then
  creation = ''
  -- Refused at maxmemory, and it may have been applied before: that must not look as if it was not.
  if type(redis.pcall('HSET', meta, 'fresh', format('%d', now_ms))) == 'table' then return {'cold', epoch, ''} end
end

local place, mark, listed, is_new, fresh
if not version then
  -- @include known_ids
  if (creation == '*' or creation == '+') and since <= (fresh or 0) + 0 then creation = '' end
  if creation == '+' and is_new then creation = '*' end
  if creation ~= '*' and (string.sub(creation, -#epoch - 1) ~= '@' .. epoch or call('GET', hydration) ~= creation) then
    local token = replica .. '.' .. sequence
    -- @include hydration_token
    return {'cold', epoch, left}
  end
end

-- Only now: a repetition must find what was applied before, also under an epoch that has ended since.
if read_under ~= '' and read_under ~= epoch then return {'epoch', epoch} end
local holder = call('GET', lock)
-- One of another epoch was granted before Redis lost something: it holds nothing any more.
if holder and not string.find(holder, '@' .. epoch .. ':', 1, true) then holder = false end
if lock_value ~= '' then
  if holder ~= lock_value then return {'fenced', holder or ''} end
elseif holder and string.byte(holder) == 120 then -- x: exclusive
  return {'locked', holder}
end

if head[3] and deleted == 'refuse' then return {'deleted', version} end
if version and not head[3] and deleted == 'create' then return {'exists', version} end

local mismatch = expected ~= '' and expected ~= (version or '0')
local found
if expectations ~= '0' then
  found = {}
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
      -- Whether it is there is all that was asked: a large value is not sent back.
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

-- @include backpressure

-- What the steps come to, with the last checks: nothing is written yet.
local size, growth, cleared = head[5] or '0', 0, false
local first_message = head[4] or '0'
local last_message, results, lives = first_message, '', head[6]
local several -- the results as a list once there are two: joined one by one, each would copy all before it
local change, changes, gone, event, last_event, interests, types, payloads, look
-- With room for one step: a table that grows costs more than the step.
local tagged, tagging -- how many tags more there will be, and whether one is new
local fields, n, said = {'#v', '', '#ops', '', '', '', '', ''}, 4, ''
-- Of a change of items: what the journal has of a step, false if nothing; the step that notes the record's first item, nil
-- if this is not it; and what is written. `public` is what is published: of items only the names.
local item_step, begin_items, put_items, public
if items then
  public = {}
  local absent = not version
  -- @include byte_order
  -- @include item_window
  -- The items that are named, as they are, and whether what is expected of them is so. `held` is what the window has of
  -- each, `known` the versions of those of which something is expected; `begins`: the change itself begins a layer, as a
  -- fork does.
  local held, known, begins = {}, {}, false
  do
    local names, fields = {}, {}
    for i = first_step, #words, 3 do
      local step, name, value = words[i], words[i + 1], words[i + 2]
      if step == 'V' or step == 'G' then
        -- What SQL said, if that is not overtaken: all that is not here is in it, and the layer's beginning.
        local of, archived, proof = string.match(value, '^(%S+) (%d+) (.*)$')
        if of == epoch and archived - needed >= 0 then
          if step == 'V' then proofs[name] = proof elseif not top(name) then greatest[name] = proof end
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
    if unknown then return {'items', epoch, format('%d', needed)} end
  end
  -- Puts and deletions, as pairs; and the version whose items lie below a new layer, '' = none begins.
  local puts, reset = {}, ''
  item_step = function(step, name, value)
    if step == 'p' or step == 'q' or step == 'n' then
      if step == 'n' then
        local free = known[name] == '-'
        local put = free and '1' or '0'
        if several then several[#several + 1] = put elseif results == '' then results = put else several = {results, put} end
        if not free then return false end
        step = 'p'
      end
      puts[#puts + 1], puts[#puts + 2] = name, value
      return step, name, value
    end
    if step ~= 'y' then return not string.find('APMVG', step, 1, true) and step, name, value end
    if since == '' then return false end
    reset, said = value, said .. 'y'
    value = format('%d', (version or 0) + 1) .. ' ' .. value
    n = n + 2
    fields[n - 1], fields[n] = '#items', value
    gone = gone or {}
    gone[#gone + 1] = '#kv'
    step, name = 's', '#items'
    return step, name, value
  end
  begin_items = function()
    if since ~= '' or begins or not puts[1] then return nil end
    said = said .. 'i'
    local first = format('%d', (version or 0) + 1)
    n = n + 2
    fields[n - 1], fields[n] = '#items', first
    return 's6:' .. #first .. ':#items' .. first
  end
  put_items = function()
    if not puts[1] then
      if reset ~= '' then call('DEL', items) end
      return
    end
    local number, count, size, put, m, left = 0, 0, 0, {}, 0, {}
    if window and reset == '' then
      number, count, size = window[2] + 0, window[4] + 0, window[5] + 0
    else
      -- Only if there is one: whatever is written first, a full Redis refuses or lets the rest be done.
      if reset ~= '' or call('EXISTS', items) == 1 then call('DEL', items) end
      held = {}
      put, m = {'#e', epoch, '#d', '1', '#f', reset ~= '' and version or format('%d', needed)}, 6
      if reset == '' and (begins or not bare) or reset ~= '' and reset ~= '0' then
        m = 8
        put[7], put[8] = '#u', reset == '' and about[2] and '2' or '1'
      end
    end
    for i = 1, #puts, 2 do
      local name, before = puts[i], held[puts[i]]
      if before then
        left[#left + 1] = 'k' .. string.match(before, '^%d+')
        count, size = count - 1, size - #before - #name
      end
      number, count = number + 1, count + 1
      local digits = format('%d', number)
      local entry = digits .. ' ' .. version .. ' ' .. puts[i + 1]
      size = size + #entry + #name
      m = m + 4
      put[m - 3], put[m - 2] = ':' .. name, entry
      put[m - 1], put[m] = 'k' .. digits, version .. ' ' .. format('%d', #entry + #name) .. ' ' .. name
    end
    if reset == '' then
      for collection, key in pairs(greatest) do
        if key then
          m = m + 2
          put[m - 1], put[m] = '#h' .. collection, key
        end
      end
    end
    if left[1] then call('HDEL', items, unpack(left)) end
    m = m + 6
    put[m - 5], put[m - 4], put[m - 3], put[m - 2] = '#n', format('%d', number), '#c', format('%d', count)
    put[m - 1], put[m] = '#b', format('%d', size)
    -- A caller changes a thousand items at most, a fork of a branch ten times as many.
    for i = 1, m, 7000 do call('HSET', items, unpack(put, i, math.min(i + 6999, m))) end
    call('PERSIST', items)
    n = n + 2
    fields[n - 1], fields[n] = '#kv', version
  end
end
-- Plain integers of at most 15 digits are exact in Lua; anything else is the caller's to swap.
local function exact(held, value)
  return #held <= 15 and #value <= 15 and string.match(held, '^-?%d+$') and string.match(value, '^-?%d+$')
end
for i = first_step, #words, 3 do
  local step, name, value = words[i], words[i + 1], words[i + 2]
  if (step == 'E' or step == 'X') and (not version or head[3]) then step = string.lower(step) end
  if step == 's' or step == 'i' or step == 'd' then
    local counts, held, before = string.byte(name) ~= 35, nil, 0
    if i == first_step then
      held = head[7]
      before = held and #held or 0
    elseif not cleared and step == 'i' then
      held = call('HGET', record, name)
      before = held and #held or 0
    elseif not cleared and counts then
      before = call('HSTRLEN', record, name)
    end
    if not counts and string.byte(name, 2) == 35 and call('HEXISTS', record, name) == (step == 's' and 0 or 1) then -- ##
      tagged, tagging = (tagged or 0) + (step == 's' and 1 or -1), tagging or step == 's'
    end
    if step == 'i' then
      held = held or '0'
      if not exact(held, value) then
        -- The others with it, or each would take a round trip of its own. A long one is no number with a deadline.
        local others = {}
        for j = i + 3, cleared and 0 or #words, 3 do
          local other = words[j] == 'i' and call('HGET', record, words[j + 1])
          if other and #other <= 64 and not exact(other, words[j + 2]) then
            others[#others + 1], others[#others + 2] = words[j + 1], other
          end
        end
        return {'swap', name, held, unpack(others, 1, math.min(#others, 7000))}
      end
      step, value = 's', format('%d', held + value)
      if several then several[#several + 1] = value elseif results == '' then results = value else several = {results, value} end
    end
    if counts and before > 0 then growth = growth - before - #name end
    if step == 'd' then
      gone = gone or {}
      gone[#gone + 1] = name
    else
      if counts then growth = growth + #name + #value end
      n = n + 2
      fields[n - 1], fields[n] = name, value
    end
  elseif step == 'm' then
    if name == '' then -- else it is a copy, with the number and the time that it had
      name, value = last_message, '!' .. format('%d', now_ms) .. ' ' .. value -- as in values/field_ttl.py: when it was said
    end
    n = n + 2
    fields[n - 1], fields[n] = '#m' .. name, value
    last_message = format('%d', name + 1)
  elseif step == 'c' or step == 'w' then
    gone = gone or {}
    -- Bounded by the record's own size limits.
    for _, key in ipairs(call('HKEYS', record)) do
      if step == 'c' and (string.byte(key) ~= 35 or name == '##' and string.sub(key, 1, 2) == name) or step == 'w' and string.match(key, '^#m%d+$') then
        gone[#gone + 1] = key
      end
    end
    if step == 'c' then
      cleared, growth = true, -size
    else
      gone[#gone + 1] = '#segments'
      n = n + 2
      fields[n - 1], fields[n] = '#ms', first_message
      value = first_message
    end
  elseif step == 'e' then
    types, payloads = types or {}, payloads or {}
    if not event then event, interests = unpack(call('HMGET', meta, 'event', 'interests')) end
    event = (event or 0) + 0
    types[#types + 1], payloads[#payloads + 1] = name, value
    last_event = format('%d', event + #types)
    name = last_event .. ' ' .. name .. ' ' .. text
  elseif step == 'x' then
    local idle, left, limit = name + 0, value + 0, 0
    look = math.huge -- when to look at it
    if left > 0 then
      limit = now_ms + left
      look = limit
    end
    if idle > 0 then look = math.min(look, now_ms + idle) end
    if look < math.huge then
      lives = true
      step, name, value = 's', '#lifetime', name .. ' ' .. format('%d', limit)
      n = n + 2
      fields[n - 1], fields[n] = name, value
    end
  elseif items then
    step, name, value = item_step(step, name, value)
  end
  if step and step ~= 'E' and step ~= 'x' and step ~= 'X' then
    local piece = step .. format('%d:%d:', #name, #value) .. name .. value
    if public then public[#public + 1] = step == 'p' and 'p' .. #name .. ':0:' .. name or piece end
    if not change then
      change = piece
    else
      changes = changes or {change}
      changes[#changes + 1] = piece
    end
  end
end
-- Whoever has fewer fields has fewer tags. Else they are counted: bounded by the record's own size limits.
if tagging and call('HLEN', record) + tagged > 256 then
  for _, key in ipairs(call('HKEYS', record)) do
    if string.sub(key, 1, 2) == '##' then tagged = tagged + 1 end
  end
  if tagged > 256 then return {'tags', format('%d', tagged)} end
end
if growth > 0 and size + growth > record_bytes then return {'toolarge', format('%d', size + growth)} end
if several then results = table.concat(several, ',') end
if kind == '' then return 'ok ' .. (version or '0') .. ' ' .. epoch .. ' ' .. first_message .. '  ' .. format('%d', offset) end
local begun = items and begin_items()
if begun then
  changes = changes or {change}
  changes[#changes + 1], public[#public + 1] = begun, begun
end
if owner ~= '' and not call('HGET', record, '#owner') then
  said = said .. 'o'
  n = n + 2
  fields[n - 1], fields[n] = '#owner', owner
  changes = changes or {change}
  changes[#changes + 1] = 's6:' .. #owner .. ':#owner' .. owner
  if public then public[#public + 1] = changes[#changes] end
end

version = format('%d', (version or 0) + 1)
local noted = remembered .. replica .. ' ' .. mine_oldest .. ' ' .. now[1] .. mine .. ' '
  .. sequence .. ':' .. version .. ':' .. digest .. ':' .. first_message .. ',' .. results
local parts = 0
-- A record with messages is in a hash table anyway: hardly one is as short as 64 bytes.
if #noted > 64 and #noted <= 1024 and last_message == '0' and size + growth <= 1024 then
  for at = 65, #noted, 64 do
    parts, n = parts + 1, n + 2
    fields[n - 1], fields[n] = '#ops' .. parts, string.sub(noted, at, at + 63)
  end
  noted = string.sub(noted, 1, 64)
end
for i = parts + 1, pieces and #pieces or 0 do
  gone = gone or {}
  gone[#gone + 1] = pieces[i]
end

-- From here on only writes.
if look == math.huge then call('ZREM', lifetimes, text) elseif look then call('ZADD', lifetimes, format('%d', look), text) end
if items then put_items() end
for i = 1, gone and #gone or 0, 7000 do call('HDEL', record, unpack(gone, i, math.min(i + 6999, #gone))) end
fields[2], fields[4] = version, noted
if growth ~= 0 or not head[5] then
  n = n + 2
  fields[n - 1], fields[n] = '#size', format('%d', size + growth)
end
if last_message ~= first_message then
  n = n + 2
  fields[n - 1], fields[n] = '#mn', last_message
end
-- When it was last committed, for who looks whether it was idle too long: nothing else is noted of that on the way.
if lives then
  n = n + 2
  fields[n - 1], fields[n] = '#t', format('%d', now_ms)
end
if n <= 7000 then
  call('HSET', record, unpack(fields, 1, n))
else
  for i = 1, n, 7000 do call('HSET', record, unpack(fields, i, math.min(i + 6999, n))) end
end
if not head[1] then
  call('DEL', hydration)
  if is_new then call('HSET', meta, place, listed .. mark) end
else
  call('PERSIST', record)
end

local data = changes and table.concat(changes) or change or ''
local token_held = lock_value ~= '' and string.match(lock_value, '^%a(%d+)') or '0'
local entry_id = replica .. '.' .. sequence .. '.' .. digest
-- @include journal
if types then
  local op, subject = replica .. '.' .. sequence, text
  -- @include events
  said = said .. 'e' .. format('%d', event + 1 - #types)
end
if head[3] then said = 'b' .. said end
-- The writer needs no message. Whether it listens only the server knows: its link may have ended without a word.
local listening = own_channel ~= '' and call('PUBSUB', 'SHARDNUMSUB', channel, own_channel)
if not listening or listening[2] > listening[4] then
  local shown = public and table.concat(public) or data
  local small = #shown <= publish_bytes
  call('SPUBLISH', channel, epoch .. ' ' .. version .. ' ' .. replica .. ' ' .. (small and '+' or '-') .. (small and shown or ''))
end
return 'ok ' .. version .. ' ' .. epoch .. ' ' .. first_message .. ' ' .. results .. ' ' .. offset .. ' ' .. now[1] .. ' ' .. now[2]
  .. ' ' .. archived_offset .. ' ' .. said
