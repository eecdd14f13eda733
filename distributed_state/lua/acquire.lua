--[[
  Take a lock, or a place in its queue. Nobody overtakes: a free lock goes to the head of the queue.
  KEYS  lock  wait  meta  record  channel
  ARGV  mode        'x' exclusive, 'a' advisory
        holder      who asks: a name used for this one attempt only
        ttl_ms      of the lock
        place       '' = do not queue; else this waiter's name, unique
        order       '' = a new place, else the score that an earlier call returned
        seen        the deadline that an earlier call returned, '' at first
        patience_ms a waiter that does not come back within this is skipped
        seize       '' = never; else take it at once from a holder that ends in '!', unless it ends in this
  Returns {'ok', grip, epoch, version | '0'} | {'wait', holder, pttl_ms, order, deadline} | {'busy', holder, pttl_ms} | {'uninitialised'}
  A place in the queue is the member 'deadline:name', scored by order.
]]
local lock, wait, meta, record, channel = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local mode, holder, ttl_ms, place, order = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local seen, patience_ms, seize = ARGV[6], ARGV[7], ARGV[8]
local now = redis.call('TIME')
local now_us = now[1] * 1000000 + now[2]
local now_ms = math.floor(now_us / 1000)
local function whole(number) return string.format('%d', number) end

local last = redis.call('HMGET', meta, 'epoch', 'token')
if not last[1] then return {'uninitialised'} end
if seen ~= '' then redis.call('ZREM', wait, seen .. ':' .. place) end
local head = redis.call('ZRANGE', wait, 0, 0, 'WITHSCORES')
while head[1] and tonumber(string.match(head[1], '^(%d+):')) < now_ms do
  redis.call('ZREM', wait, head[1])
  head = redis.call('ZRANGE', wait, 0, 0, 'WITHSCORES')
end

local held = redis.call('GET', lock)
-- Asked again because the answer was lost: it is ours already.
if held and string.sub(held, -#holder - 1) == ':' .. holder then
  redis.call('PEXPIRE', lock, ttl_ms)
  return {'ok', held, last[1], redis.call('HGET', record, '#v') or '0'}
end
local seized = held and seize ~= '' and order == '' and string.sub(held, -1) == '!' and string.sub(held, -#seize) ~= seize
if seized then redis.call('SPUBLISH', channel, last[1] .. ' 0 ' .. held .. ' !') end
if seized or not held and (not head[1] or (order ~= '' and tonumber(order) < tonumber(head[2]))) then
  local token = whole(math.max(tonumber(last[2] or '0') + 1, now_us))
  local grip = mode .. token .. ':' .. holder
  redis.call('HSET', meta, 'token', token)
  redis.call('SET', lock, grip, 'PX', ttl_ms)
  -- The version lets the holder see at once whether its hot copy is behind.
  return {'ok', grip, last[1], redis.call('HGET', record, '#v') or '0'}
end
local left = redis.call('PTTL', lock)
if place == '' then return {'busy', held or '', left} end
if order == '' then
  local tail = redis.call('ZRANGE', wait, -1, -1, 'WITHSCORES')
  order = whole(math.max(now_us, tonumber(tail[2] or '0') + 1))
end
local deadline = whole(now_ms + patience_ms)
redis.call('ZADD', wait, order, deadline .. ':' .. place)
redis.call('PEXPIRE', wait, whole(patience_ms * 2))
return {'wait', held or '', left, order, deadline}
