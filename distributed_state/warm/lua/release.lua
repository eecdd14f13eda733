--[[
  Release a lock if it is still the caller's, leave its queue, and offer the lock to the next waiter, which is skipped
  unless it comes within the grace period.
  KEYS  lock  wait  lock_channel  record  leases  output  output_channel
        the last two if the turn's output ends without a commit
  ARGV  holder  the name under which the lock was requested
        order   of the caller's place in the queue, '' = none
        grace_ms
        replica, sequence   the op id of a commit sent just before: the lock is kept unless that was applied. '' = none
        number, tag, content, output_ttl     of the end of the output: see output_entry.lua
  Returns {'ok'} | {'lost'} | {'kept'}
]]
local lock, wait, lock_channel, record, leases, output, output_channel = unpack(KEYS)
local holder, order, grace_ms, replica, sequence, number, tag, content, output_ttl = unpack(ARGV)
-- A commit that was not applied (its script is unknown here, the record left Redis, an increment has to be a swap) is sent
-- again under this lock. If it was applied, the record has its op id: see known_op.lua.
if sequence ~= '' then
  local ops = redis.call('HGET', record, '#ops')
  -- @include op_pieces
  ops = ';' .. (ops or '')
  local at = string.find(ops, ';' .. replica .. ' ', 1, true)
  if not at then return {'kept'} end
  if not string.find(string.match(ops, '^[^;]*', at + 1), ' ' .. sequence .. ':', 1, true) then return {'kept'} end
end
local held = redis.call('GET', lock)
if order ~= '' then
  redis.call('ZREMRANGEBYSCORE', wait, order, order)
  redis.call('ZREMRANGEBYSCORE', wait, '-' .. order, '-' .. order)
end
if held and string.sub(held, -#holder - 1) ~= ':' .. holder then return {'lost'} end
redis.call('DEL', lock)
redis.call('ZREM', leases, record)
if output and held then
  local call, format, how, count, token = redis.call, string.format, 'e', '0', string.match(held, '^%a(%d+)')
  -- @include output_newest
  -- @include output_entry
end
-- Usually there are no waiters, and the time is not needed.
if redis.call('EXISTS', wait) == 0 then return {'ok'} end
local place = ''
-- @include clock
-- @include queue_head
if deadline then
  local offered = format('%d', math.min(tonumber(deadline), now_ms + grace_ms)) .. ':' .. name
  if offered ~= head[1] then
    redis.call('ZADD', wait, head[2], offered)
    redis.call('ZREM', wait, head[1])
  end
  redis.call('SPUBLISH', lock_channel, offered)
end
return {'ok'}
