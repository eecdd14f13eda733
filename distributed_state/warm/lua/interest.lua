--[[
  From now on publish events of some types on a separate channel, each with the offset of the previous one of these types.
  The caller is subscribed to that channel already. The list is kept as long as the channel has a subscriber.
  KEYS  meta  events_channel
  ARGV  types   'turn.ended,conversation.*': joined by ',', each a type or all that begin so
        most    how many lists are kept at most
  Returns {'ok'} | {'uninitialised'} | {'full'}
]]
local meta, events_channel = KEYS[1], KEYS[2]
local types, most = ARGV[1], tonumber(ARGV[2])
local epoch, event, interests = unpack(redis.call('HMGET', meta, 'epoch', 'event', 'interests'))
if not epoch then return {'uninitialised'} end
local kept, count = '', 0
for list, before in string.gmatch(interests or '', '(%S+)@(%d+)') do
  if list == types then return {'ok'} end
  if redis.call('PUBSUB', 'SHARDNUMSUB', events_channel .. ':' .. list)[2] > 0 then
    kept, count = kept .. list .. '@' .. before .. ' ', count + 1
  end
end
if count >= most then return {'full'} end
-- It is unknown which of the earlier events were of these types.
redis.call('HSET', meta, 'interests', kept .. types .. '@' .. (event or '0') .. ' ')
return {'ok'}
