--[[
  Read those items of a record that Redis has.
  KEYS  record  items  meta
  ARGV  data_id of the connection: see port/identities.py
        ttl_ms  a TTL that exists is extended to this when a tenth of it is gone
        then names
  Returns {'ok', epoch, version, since, item, ...}   as in item_window.lua; an item is 'version ' and its frame, '-' if
          there is none, '' if only SQL knows
        | {'cold', epoch} | {'uninitialised'}
]]
local record, items, meta = KEYS[1], KEYS[2], KEYS[3]
local data_id, ttl_ms = ARGV[1], ARGV[2]
local call = redis.call
-- @include clock
-- @include epoch
-- @include same_data
-- @include item_reading
-- @include byte_order
-- @include item_window
local answer, held = {}, {}
if window then
  local names = {}
  for i = 3, #ARGV do names[#names + 1] = ':' .. ARGV[i] end
  held = call('HMGET', items, unpack(names))
end
for i = 3, #ARGV do
  local found = held[i - 2]
  local known = stamp(ARGV[i], found)
  if known and known ~= '-' then
    answer[#answer + 1] = string.match(found, '^%d+ (.*)$')
  else
    answer[#answer + 1] = known or ''
  end
end
return {'ok', epoch, version, layer_from, unpack(answer)}
