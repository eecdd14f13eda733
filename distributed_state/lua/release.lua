--[[
  Give a lock back if it is still ours, leave its queue, and wake the next in line.
  KEYS  lock  wait  lock_channel  record
  ARGV  holder  the name under which it was asked for
        member  our place in the queue, '' = none
        behind  '' | 'commit' = a commit was sent just before; if it found no record the lock is still needed
  Returns {'ok'} | {'lost'} | {'absent'}
]]
local lock, wait, lock_channel, record = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local holder, member, behind = ARGV[1], ARGV[2], ARGV[3]
if behind == 'commit' and redis.call('EXISTS', record) == 0 then return {'absent'} end
local held = redis.call('GET', lock)
if member ~= '' then redis.call('ZREM', wait, member) end
if held and string.sub(held, -#holder - 1) ~= ':' .. holder then return {'lost'} end
redis.call('DEL', lock)
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local head = redis.call('ZRANGE', wait, 0, 0)
while head[1] and tonumber(string.match(head[1], '^(%d+):')) < now_ms do
  redis.call('ZREM', wait, head[1])
  head = redis.call('ZRANGE', wait, 0, 0)
end
if head[1] then redis.call('SPUBLISH', lock_channel, head[1]) end
return {'ok'}
