--[[
  The head of a lock's queue, after waiters that did not come back in time were removed.
  Expects  clock, wait, place (also removed: the place of an earlier call with this name, whose answer was lost; '' = none)
  Defines  marked           whether there are waiters that were asked to stop. Their scores are negative: see stop.lua
           head             {member, score}, empty if there are no other waiters
           deadline, name   the parts of the member, nil if there are no waiters
]]
local head = redis.call('ZRANGE', wait, 0, 0, 'WITHSCORES')
local marked = head[2] and string.byte(head[2]) == 45 -- a minus
if marked then head = redis.call('ZRANGEBYSCORE', wait, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1) end
local deadline, name = string.match(head[1] or '', '^(%d+):(.*)$')
while deadline and (tonumber(deadline) < now_ms or name == place) do
  redis.call('ZREM', wait, head[1])
  head = redis.call('ZRANGEBYSCORE', wait, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  deadline, name = string.match(head[1] or '', '^(%d+):(.*)$')
end
