--[[
  Store values of a record in another form, each only if it has not changed since it was read. The version does not change.
  KEYS  record  hydration  channel  items
  ARGV  epoch  replica
        then triples: field, the bytes that were found, the bytes to store, '' to drop the field
  Returns {'ok', 1 if some of the record is not archived yet} | {'absent'}
]]
local record, hydration, channel, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local epoch, replica = ARGV[1], ARGV[2]
-- The token is deleted in any case: a reader of SQL must not hydrate the record with the earlier form.
redis.call('DEL', hydration)
local version = redis.call('HGET', record, '#v')
if not version then return {'absent'} end
for i = 3, #ARGV, 3 do
  local name, found, again = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('HGET', record, name) == found then
    if again == '' then redis.call('HDEL', record, name) else redis.call('HSET', record, name, again) end
  end
end
-- Archived items are then read from SQL, in their form there. Unarchived items stay.
if redis.call('PTTL', items) >= 0 then redis.call('DEL', items) end
-- Published as the next version, without its changes: replicas see a gap, and read their hot copies again.
redis.call('SPUBLISH', channel, epoch .. ' ' .. string.format('%d', version + 1) .. ' ' .. replica .. ' -')
return {'ok', (redis.call('PTTL', record) == -1 or redis.call('EXISTS', items) == 1) and 1 or 0}
