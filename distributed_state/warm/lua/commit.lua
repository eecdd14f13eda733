--[[
  Change one record. A script does not roll back, so every check comes before the first write.
  KEYS  record  lock  hydration  journal  meta  channel  events  events_channel  lifetimes  items  output  output_channel  due  due_channel
        those from events on only for operations 'e', 'E', 'x', 'X', 'z', 'D' and on items, from lifetimes on not for 'e' and
        'E' alone, from output on for 'z' and 'D', which without items have the output in their place, too; due for 'D'
  ARGV  data_id         of the connection: see port/identities.py
        replica         part of the op id: see known_op.lua
        epoch           under which the caller read the record, '' = any
        sequence, oldest, digest     the rest of the op id
        since           ms of the server's clock: this op id was not applied before that time
        lock_value      the lock's value as acquired, '' = the caller holds no lock
        creation        '' = the record must exist, '*' = its id is new, '?' = as '', but '*' was sent before and may still
                        arrive, '+' = it may be new, and is created if its id is not known here; else the hydration token
        expected        version, '' = any, '0' = absent
        deleted         for a deleted record: 'refuse' it, 'begin' or 'revive' it (the same here), or 'create' it, which
                        refuses a record that is not deleted; 'expired': begin one that expired, refuse one deleted on request
        kind, actor, owner, text     kind '' = only check; the owner is set if the record has none; text names the record
        own_channel     of the writer's link, if that is subscribed to the record's channel too, else ''
        expectations    their number, then pairs of field and value: see expectations.lua
        then triples: operation, name, value: see operations.lua, and item_checks.lua for operations on items
  Returns 'ok version epoch first_message results offset seconds microseconds archived_offset flags'
          one text, because each element of an answer costs as much as an operation. first_message: its number.
          results, joined by ',': the sum of each increment, 1 or 0 for each 'n' (whether it put its item). offset: of the
          journal's entry, archived_offset: how far the journal is archived. seconds, microseconds: the server's time. flags: 'o' the owner was
          set, 'b' a deleted record began again, 'a' #deleted was removed for that, 'y' a new layer of items began, 'i' the record's first items, 'e' and the
          number of the first event. The answer for a commit that was applied before ends with offset
        | {'uninitialised'} | {'epoch', epoch} | {'deleted', version, raw value of #deleted} | {'exists', version}
        | {'cold', epoch, token}   the record is not here; token '' = Redis is too full for one, and nothing can be written.
          Only SQL knows whether this op id was applied before
        | {'fenced', holder} | {'locked', holder} | {'conflict', version, raw value | '+' | false ...}
        | {'swap', field, raw value, ...} | {'backpressure', entries, bytes} | {'toolarge', bytes} | {'tags', how many}
        | {'posted', number}   of an input that was accepted before; 0 = none of those to withdraw is there
        | {'inbox', inputs, bytes}   it is full | {'handler', name}   of the session, which the change must name
        | {'forgotten'} | {'misused', version} | {'item', name, version or '-'} | {'items', epoch, needed}   the caller must read the items in SQL, and send their versions
        | {'unsure', ms, epoch}   it may have been applied before the record was hydrated; only SQL knows
        | {'late', ms, epoch}     op ids are not kept for that long
        ms is the server's clock in both; nothing was changed
]]
local record, lock, hydration, journal, meta, channel, events, events_channel, lifetimes, items, output, output_channel, due, due_channel = unpack(KEYS)
if items == output then items = nil end
-- All are strings. Arithmetic converts one where it is needed, which costs half of what tonumber() does.
local data_id, replica, epoch, sequence, oldest, digest, since, lock_value, creation, expected, deleted, kind, actor, owner, text,
  own_channel, expectations = unpack(ARGV, 1, 17)
local first_operation = expectations == '0' and 18 or 18 + 2 * expectations
local call, words = redis.call, ARGV
-- Limits of the store's settings, here the defaults, are constants in the text: an argument costs more than an operation.
local publish_bytes = 4096 -- @constant changes up to this size are published whole
local journal_entries = 100000 -- @constant
local journal_bytes = 67108864 -- @constant
local record_bytes = 33554432 -- @constant
local window_ms = 300000 -- @constant how long op ids of other replicas are kept
local kept_events = 10000 -- @constant how many lifecycle events stay in the stream
local output_ttl = 600000 -- @constant
local inbox_limit = 64 -- @constant
local inbox_bytes = 262144 -- @constant

-- Is the partition here, under the data id of the connection?
-- @include clock
local written = call('HGET', meta, 'journal')
-- @include written
-- @include same_data
-- @include journal_end
if not current then return {'uninitialised'} end
local read_under = epoch
epoch = current

-- Was this applied before? The first operation's field is read with it: most changes are of one field, and a call costs
-- as much as two or three fields.
local head = call('HMGET', record, '#v', '#ops', '#deleted', '#mn', '#size', '#lifetime', words[first_operation + 1] or '')
local version, ops = head[1], head[2]
-- @include op_pieces
-- @include known_op

-- Is the record here, or may it be created? A commit with '*' needs no hydration token, so only this check stops one
-- that arrives after its repetition was applied, archived and evicted. The repetition notes the time in a key that is
-- never evicted, before it is applied or answered from SQL.
if creation == '?' then
  creation = ''
  -- Redis is too full. The write may have been applied before, so it must not be refused: the caller asks SQL.
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
    return {'cold', epoch, hydration_token}
  end
end

-- Checked only now: a repetition must find an earlier application, even under an epoch that has ended.
if read_under ~= '' and read_under ~= epoch then return {'epoch', epoch} end
local holder = call('GET', lock)
-- A lock of another epoch was granted before Redis lost data, and is no longer valid.
if holder and not string.find(holder, '@' .. epoch .. ':', 1, true) then holder = false end
if lock_value ~= '' then
  if holder ~= lock_value then return {'fenced', holder or ''} end
elseif holder and string.byte(holder) == 120 then -- x: exclusive
  -- An input may be posted or withdrawn meanwhile, and nothing else with it but what begins a session. Only a turn, whose
  -- holder's name ends in '!', lets a session begin: an import holds the lock of the record that it puts into SQL.
  local passes = (kind == 'post' or kind == 'wake' or kind == 'schedule') and (version or string.byte(holder, -1) == 33)
  for i = first_operation, #words, 3 do
    passes = passes and (string.find('ITWDEX', words[i], 1, true) or kind == 'schedule' and (words[i + 1] == '#be' or words[i] == 'e'))
  end
  if not passes then return {'locked', holder} end
end
if head[3] == '1' and deleted == 'expired' then deleted = 'refuse' end
if head[3] and deleted == 'refuse' then return {'deleted', version, head[3]} end
if version and not head[3] and deleted == 'create' then return {'exists', version} end
-- @include expectations
-- @include backpressure
local item_operation, new_layer, write_items
if items then
  -- @include byte_order
  -- @include item_window
  -- @include item_checks
  -- @include item_writes
end
-- @include operations
-- @include inbox
-- @include schedule
if kind == '' then return 'ok ' .. (version or '0') .. ' ' .. epoch .. ' ' .. first_message .. '  ' .. format('%d', offset) end

-- The operations that the store adds to those of the caller.
version = format('%d', (version or 0) + 1)
-- @include added_operations
-- @include noted_op

-- All checks have passed; only writes follow.
if next_look == math.huge then
  call('ZREM', lifetimes, text)
elseif next_look then
  call('ZADD', lifetimes, format('%d', next_look), text)
end
if due_at == '-' then
  call('ZREM', due, text)
elseif due_at then
  call('ZADD', due, due_at, text)
  if due_at - now_ms <= 0 then call('SPUBLISH', due_channel, due) end
end
if items and write_items(version) then
  n = n + 2
  fields[n - 1], fields[n] = '#kv', version
end
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
-- The time of the last commit, by which the reaper finds idle sessions.
if has_lifetime then
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

if ends_output then
  local token, how, count, number, tag, content = string.match(lock_value, '^%a(%d+)'), 'e', '0', unpack(ends_output)
  content = content .. ' ' .. version
  -- @include output_newest
  -- @include output_entry
end
local data = changes and table.concat(changes) or change or ''
local token_held = lock_value ~= '' and string.match(lock_value, '^%a(%d+)') or '0'
local entry_id = replica .. '.' .. sequence .. '.' .. digest
-- @include journal
if types then
  local op, subject = replica .. '.' .. sequence, text
  -- @include events
  flags = flags .. 'e' .. format('%d', event + 1 - #types)
end
if head[3] then flags = 'b' .. flags end
-- No message is published if the writer is the only subscriber. The server decides that, because the writer's link may
-- have ended unnoticed.
local listening = own_channel ~= '' and call('PUBSUB', 'SHARDNUMSUB', channel, own_channel)
if not listening or listening[2] > listening[4] then
  local shown = public and table.concat(public) or data
  local small = #shown <= publish_bytes
  call('SPUBLISH', channel, epoch .. ' ' .. version .. ' ' .. replica .. ' ' .. (small and '+' or '-') .. (small and shown or ''))
end
return 'ok ' .. version .. ' ' .. epoch .. ' ' .. first_message .. ' ' .. results .. ' ' .. offset .. ' ' .. now[1] .. ' ' .. now[2]
  .. ' ' .. archived_offset .. ' ' .. flags
