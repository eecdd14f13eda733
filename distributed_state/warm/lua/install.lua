--[[
  Start a partition under a new epoch, which SQL knows already. Offsets of the journal begin anew. What was written
  under the epoch before stays, as far as it is not discarded.
  KEYS  meta  journal  events
  ARGV  life       of the connection: see port/lives.py
        token      of the right to mint
        seen       the epoch before, as it was when the right was given; '' = none
        epoch
        continued  '1' = the stream of events lacks nothing of the epoch before, and goes on
        ended      the last event that SQL has of the epoch before
        floor      fencing tokens are greater than this
        known      '1' = the ids of all records of SQL follow: field, digits, ... as in known_ids.lua
  Returns {'ok'} | {'live', epoch} | {'lost'}
]]
local meta, journal, events = KEYS[1], KEYS[2], KEYS[3]
local life, token, seen, epoch, continued, ended, floor, known = unpack(ARGV, 1, 8)
-- @include epoch
if current then return {'live', current} end
-- @include mint_right
if life == '' or not may then return {'lost'} end
local before = redis.call('HMGET', meta, 'event', 'event_floor', 'event_floor_ms', 'token', 'continues', 'interests')
-- @include clock
-- DEL first: after it even a full Redis lets the rest be done.
redis.call('DEL', journal)
local event, event_floor, floor_ms = before[1] or '0', before[2] or '0', before[3] or '0'
-- Of each epoch that the stream has events of, how far it went there, the latest first: the last eight.
local continues, kept = seen .. '@' .. event, 1
for each in string.gmatch(before[5] or '', '%S+') do
  if kept < 8 then continues, kept = continues .. ' ' .. each, kept + 1 end
end
if continued ~= '1' or seen == '' then
  redis.call('DEL', events)
  event, event_floor, floor_ms, continues = '0', '0', format('%d', now_ms), ''
else
  ended = '0' -- the stream has them
end
-- Every lease of before is over, and every holder of one has a smaller token than who comes now.
floor = format('%d', math.max(floor + 0, (before[4] or '0') + 0))
-- `fresh`: what was written before this is not here: see commit.lua and emit.lua. `lifetimes` are looked through anew.
redis.call('HDEL', meta, 'mint', 'lifetimes', 'names', 'k0', 'k1', 'k2', 'k3', 'k4', 'k5', 'k6', 'k7', 'k8', 'k9',
  'ka', 'kb', 'kc', 'kd', 'ke', 'kf')
redis.call('HSET', meta, 'epoch', epoch, 'life', life, 'journal', epoch .. ' 0 0 0 0 ' .. life .. ' 0', 'token', floor,
  'event', event, 'event_floor', event_floor, 'event_floor_ms', floor_ms, 'continues', continues,
  'ended', ended, 'fresh', format('%d', now_ms))
-- Who asks for some types knows nothing of what came before; without memory for that they ask anew.
if before[6] then redis.call('HSET', meta, 'interests', (string.gsub(before[6], '@%d+', '@' .. event))) end
if known == '1' then redis.call('HSET', meta, 'names', epoch, unpack(ARGV, 9)) end
return {'ok'}
