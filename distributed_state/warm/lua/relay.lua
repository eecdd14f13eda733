--[[
  Take, keep or give back the right to pass on the events of a partition: while it lasts they are published to one
  replica alone. It is kept in the partition's meta, which a script that writes an event reads anyway.
  KEYS  meta  events_channel
  ARGV  name      of the replica's turn
        ttl_ms    it lasts so long from now on, 2000 at most; 0 = give it back
        least     listeners, of whom fewer do not need it
  Returns {'ok', listeners} | {'taken', listeners} | {'few', listeners}
]]
local meta, events_channel = KEYS[1], KEYS[2]
local name, ttl_ms, least = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
local relay, interests = unpack(redis.call('HMGET', meta, 'relay', 'interests'))
local listeners = redis.call('PUBSUB', 'SHARDNUMSUB', events_channel)[2]
for list in string.gmatch(interests or '', '(%S+)@') do
  listeners = listeners + redis.call('PUBSUB', 'SHARDNUMSUB', events_channel .. ':' .. list)[2]
end
local ends, holder = string.match(relay or '', '^(%d+) (.+)$')
local left = (ends or 0) - now_ms
if holder and holder ~= name and left > 0 and left <= 2000 then return {'taken', listeners} end
-- First what takes no memory: a full Redis lets the rest be done then.
redis.call('HDEL', meta, 'relay')
if ttl_ms == '0' then return {'ok', listeners} end
if listeners < tonumber(least) then return {'few', listeners} end
redis.call('HSET', meta, 'relay', format('%d', now_ms + ttl_ms) .. ' ' .. name)
return {'ok', listeners}
