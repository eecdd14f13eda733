--[[
  Compare records of a partition with the versions that the caller has. No TTL is extended, and no hydration token is left.
  KEYS  meta  records ...
  ARGV  data_id of the connection: see port/identities.py
        then for each record the caller's 'epoch version'
  Returns {'ok', words} | {'uninitialised'}   a word for each record, with spaces between: same, other or absent
]]
local meta, records = KEYS[1], {unpack(KEYS, 2)}
local data_id = ARGV[1]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
local words = {}
for i, record in ipairs(records) do
  local version = redis.call('HGET', record, '#v')
  words[i] = not version and 'absent' or current .. ' ' .. version == ARGV[i + 1] and 'same' or 'other'
end
return {'ok', table.concat(words, ' ')}
