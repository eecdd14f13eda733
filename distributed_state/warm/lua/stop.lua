--[[
  Ask the holder of a lock to stop, or take a waiting request out of the lock's queue.
  KEYS  lock  stop  wait  meta  channel  lock_channel  output_channel
  ARGV  data_id   of the connection: see port/identities.py
        tag       of the request whose turn is to stop, '' = whoever holds the lock
        reason    in base64
        kept_ms   how long the stop is kept for a holder that does not receive it, at least
        token     only the holder with this token, '' = any
  Returns {'asked', lock_value} | {'waiting'} | {'none'} | {'uninitialised'}
  The stop is kept as the lock value, a line end and the reason; another line end says that a holder outside of the fleet
  knows it. A waiting request leaves the queue: its place becomes 'deadline:name?reason', with a negative score, until the
  deadline, so that its next acquire is refused even if it has to be repeated: see queue_head.lua.
]]
local lock, stop, wait, meta, channel, lock_channel, output_channel = unpack(KEYS)
local data_id, tag, reason, kept_ms, token = unpack(ARGV)
local call = redis.call
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
local ending = '.' .. tag .. '!'
local holder = call('GET', lock)
-- A lock of another epoch was granted before Redis lost data, and is no longer valid.
if holder and string.find(holder, '@' .. current .. ':', 1, true) and (tag == '' or string.sub(holder, -#ending) == ending)
  and (token == '' or string.match(holder, '^%a(%d+)') == token) then
  -- It names the holder, so it never reaches the next one.
  call('SET', stop, holder .. '\n' .. reason, 'PX', format('%d', math.max(call('PTTL', lock), 0) + kept_ms))
  call('SPUBLISH', channel, current .. ' 0 ' .. holder .. ' ?' .. reason)
  call('SPUBLISH', output_channel, 'stop')
  return {'asked', holder}
end
local found = false
if tag ~= '' and token == '' then
  local queue = call('ZRANGE', wait, 0, -1, 'WITHSCORES')
  for at = 1, #queue, 2 do
    local member, order = queue[at], queue[at + 1]
    local deadline, name = string.match(member, '^(%d+):([^?]*)')
    if string.sub(name, -#ending) == ending then
      if string.byte(order) == 45 then -- a minus: it was asked before. After four seconds, it must have died
        found = found or deadline - now_ms > kept_ms - 4000
      else
        call('ZREM', wait, member)
        call('ZADD', wait, '-' .. order, format('%d', now_ms + kept_ms) .. ':' .. name .. '?' .. reason)
        call('SPUBLISH', lock_channel, member)
        found = true
      end
    end
  end
end
if found then
  call('PEXPIRE', wait, kept_ms)
  return {'waiting'}
end
return {'none'}
