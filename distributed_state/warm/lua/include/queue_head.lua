--[[
  The head of a lock's queue, after whoever did not come back in time was taken out.
  Expects  clock, wait, place (taken out as well: what a call of the same name left, whose answer was lost; '' = none)
  Defines  head             {member, score}, empty if nobody waits
           deadline, name   what the member is made of, nil if nobody waits
]]
local head = redis.call('ZRANGE', wait, 0, 0, 'WITHSCORES')
local deadline, name = string.match(head[1] or '', '^(%d+):(.*)$')
while deadline and (tonumber(deadline) < now_ms or name == place) do
  redis.call('ZREM', wait, head[1])
  head = redis.call('ZRANGE', wait, 0, 0, 'WITHSCORES')
  deadline, name = string.match(head[1] or '', '^(%d+):(.*)$')
end
