--[[
  Take a lock, or a place in its queue. A free lock goes to the head of the queue; the next waiter gets it only if the head
  does not come within the grace period.
  KEYS  lock  wait  meta  record  channel  lock_channel  leases  asked  asked_all
        the last two for a step of a workflow: stops of its request, and of all of the session's workflows
  ARGV  data_id     of the connection: see port/identities.py
        mode        'x' exclusive, 'a' advisory
        holder      a name that is used for this attempt only
        ttl_ms      of the lock
        place       '' = do not queue; else this waiter's name, unique
        order       '' = a new place, else the score that an earlier call returned
        waiter_ms a waiter that does not come back within this is skipped
        grace_ms    a waiter that is offered the lock is skipped if it does not come within this
        seize       '' = never; else take the lock at once: from a holder whose name ends in '!' and not in this text; or
                    with 'token@', from the holder of that token
  Returns {'ok', lock_value, epoch, version | '0'} | {'wait', holder, left_ms, order} | {'busy', holder, left_ms} | {'uninitialised'}
          | {'stopped', reason}   while it waited (see stop.lua), or before the step
  left_ms is the time until the lock ends; for a free lock, the time in which the head of the queue must come.
  `leases` has the records whose locks were granted, scored by their tokens; some of these locks have expired.
  A place in the queue is the member 'deadline:name', scored by order, which no other place has.
]]
local lock, wait, meta, record, channel, lock_channel, leases, asked, asked_all = unpack(KEYS)
local data_id, mode, holder, ttl_ms, place, order = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local waiter_ms, grace_ms, seize = ARGV[7], ARGV[8], ARGV[9]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
local epoch = current
local own = asked and redis.call('GET', asked)
local stop = own or asked and redis.call('GET', asked_all)
if stop then
  local reason, seen = string.match(stop, '^([^\n]*)\n?(.*)$')
  if seen == '' or seen == holder then
    stop = reason .. '\n' .. holder -- which says that the step has seen it
    if own then redis.call('SET', asked, stop, 'KEEPTTL') else redis.call('SET', asked_all, stop, 'KEEPTTL') end
    return {'stopped', reason}
  end
end
-- Removed by its order, because an offer of the lock changes the deadline in the member.
if order ~= '' then redis.call('ZREMRANGEBYSCORE', wait, order, order) end
-- @include queue_head
if marked then
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', wait, '-inf', '(0')) do
    local by, stopped, reason = string.match(member, '^(%d+):([^?]*)%?(.*)$')
    if tonumber(by) < now_ms then
      redis.call('ZREM', wait, member)
    elseif stopped == holder then
      return {'stopped', reason}
    end
  end
end

local held = redis.call('GET', lock)
-- A lock of another epoch was granted before Redis lost data, and is no longer valid.
if held and not string.find(held, '@' .. epoch .. ':', 1, true) then held = false end
-- The answer of an earlier call was lost: the caller has the lock already.
if held and string.sub(held, -#holder - 1) == ':' .. holder then
  redis.call('PEXPIRE', lock, ttl_ms)
  return {'ok', held, epoch, redis.call('HGET', record, '#v') or '0'}
end
local seized = held and seize ~= '' and order == '' and (string.sub(held, 2, #seize + 1) == seize
  or string.sub(seize, -1) == '!' and string.sub(held, -1) == '!' and string.sub(held, -#seize) ~= seize)
if seized then redis.call('SPUBLISH', channel, epoch .. ' 0 ' .. held .. ' !') end
if seized or not held and (not head[1] or (order ~= '' and tonumber(order) < tonumber(head[2]))) then
  local token = format('%d', math.max((redis.call('HGET', meta, 'token') or 0) + 1, now[1] * 1000000 + now[2]))
  local lock_value = mode .. token .. '@' .. epoch .. ':' .. holder
  redis.call('HSET', meta, 'token', token)
  redis.call('SET', lock, lock_value, 'PX', ttl_ms)
  redis.call('ZADD', leases, token, record)
  -- The version lets the holder see at once whether its hot copy is behind; without one it reads the record again.
  return {'ok', lock_value, epoch, redis.call('HGET', record, '#v') or '0'}
end
local left = redis.call('PTTL', lock)
if not held then
  -- The lock is free, but not for this caller: it ended without a release, which wakes no waiter, or the woken waiter
  -- has not come yet.
  local by = format('%d', now_ms + grace_ms)
  if tonumber(deadline) > tonumber(by) then
    redis.call('ZADD', wait, head[2], by .. ':' .. name)
    redis.call('ZREM', wait, head[1])
    redis.call('SPUBLISH', lock_channel, by .. ':' .. name)
    deadline = by
  end
  left = tonumber(deadline) - now_ms + 1
end
if place == '' then return {'busy', held or '', left} end
if order == '' then
  local tail = redis.call('ZRANGE', wait, -1, -1, 'WITHSCORES')
  order = format('%d', math.max(now[1] * 1000000 + now[2], (tail[2] or 0) + 1))
end
redis.call('ZADD', wait, order, format('%d', now_ms + waiter_ms) .. ':' .. place)
if not marked then redis.call('PEXPIRE', wait, format('%d', waiter_ms * 2)) end
return {'wait', held or '', left, order}
