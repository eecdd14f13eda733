--[[
  Start a partition under a new epoch, which SQL knows already. Offsets of the journal start from the beginning. Records of the previous
  epoch stay unless they were discarded.
  KEYS  meta  journal  events
  ARGV  data_id    of the connection: see port/identities.py
        token      of the right to mint
        seen       the previous epoch, when the right was given; '' = none
        epoch
        continued  '1' = the stream has all events of the previous epoch, and continues
        ended      the last event of the previous epoch that SQL has
        floor      fencing tokens are greater than this
        known      '1' = the ids of all records of SQL follow: field, digits, ... as in known_ids.lua
  Returns {'ok'} | {'live', epoch} | {'lost'}
]]
local meta, journal, events = KEYS[1], KEYS[2], KEYS[3]
local data_id, token, seen, epoch, continued, ended, floor, known = unpack(ARGV, 1, 8)
-- @include epoch
if current then return {'live', current} end
-- @include mint_right
if data_id == '' or not may then return {'lost'} end
local before = redis.call('HMGET', meta, 'event', 'event_floor', 'event_floor_ms', 'token', 'continues', 'interests')
-- @include clock
-- DEL comes first: after it even a full Redis accepts the rest.
redis.call('DEL', journal)
local event, event_floor, floor_ms = before[1] or '0', before[2] or '0', before[3] or '0'
-- The last event of each epoch in the stream, the latest epoch first, eight at most.
local continues, kept = seen .. '@' .. event, 1
for each in string.gmatch(before[5] or '', '%S+') do
  if kept < 8 then continues, kept = continues .. ' ' .. each, kept + 1 end
end
if continued ~= '1' or seen == '' then
  redis.call('DEL', events)
  event, event_floor, floor_ms, continues = '0', '0', format('%d', now_ms), ''
else
  ended = '0' -- the stream has the last events
end
-- All earlier leases have ended, and new tokens are greater than theirs.
floor = format('%d', math.max(floor + 0, (before[4] or '0') + 0))
-- `fresh`: earlier op ids and events are not here: see commit.lua and emit.lua. `lifetimes` is filled again.
redis.call('HDEL', meta, 'mint', 'lifetimes', 'names', 'k0', 'k1', 'k2', 'k3', 'k4', 'k5', 'k6', 'k7', 'k8', 'k9',
  'ka', 'kb', 'kc', 'kd', 'ke', 'kf')
redis.call('HSET', meta, 'epoch', epoch, 'life', data_id, 'journal', epoch .. ' 0 0 0 0 ' .. data_id .. ' 0', 'token', floor,
  'event', event, 'event_floor', event_floor, 'event_floor_ms', floor_ms, 'continues', continues,
  'ended', ended, 'fresh', format('%d', now_ms))
-- Lists of event types begin again with this event; if Redis is too full for that, subscribers ask again.
if before[6] then redis.call('HSET', meta, 'interests', (string.gsub(before[6], '@%d+', '@' .. event))) end
if known == '1' then redis.call('HSET', meta, 'names', epoch, unpack(ARGV, 9)) end
return {'ok'}
