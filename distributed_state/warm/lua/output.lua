--[[
  Append chunks to the output of the turn that holds the lock. A batch may be sent several times, and is appended once: the
  holder numbers its chunks, and sends a batch when the one before was answered.
  KEYS  lock  meta  output  output_channel
  ARGV  data_id        of the connection: see port/identities.py
        lock_value     as acquired
        number, count  of the last chunk; how many chunks there are
        tag            of the request
        how            'c' chunks, 'e' the end
        content
        output_bytes   how much of the stream is kept, the newest
        output_ttl     ms
  Returns {'ok'} | {'duplicate'} | {'fenced', holder} | {'uninitialised'} | the error of XADD, if Redis is full
]]
local lock, meta, output, output_channel = unpack(KEYS)
local data_id, lock_value, number, count, tag, how, content, output_bytes, output_ttl = unpack(ARGV)
local call, format = redis.call, string.format
-- @include epoch
-- same_data is not included: output is not state, and what is streamed to an older copy of the data, in which the lock is
-- still the sender's, ends there without a commit.
if not current then return {'uninitialised'} end
local holder = call('GET', lock)
-- A lock of another epoch was granted before Redis lost data, and is no longer valid.
if holder ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then return {'fenced', holder or ''} end
local token = string.match(lock_value, '^%a(%d+)')
-- @include output_newest
if number + 0 <= last then return {'duplicate'} end

while total + size - floor > output_bytes + 0 do
  local oldest = call('XRANGE', output, '-', '+', 'COUNT', 1)[1]
  if not oldest then break end
  floor = string.match(oldest[2][2], '^%d+') + 0
  call('XDEL', output, oldest[1])
end
-- @include output_entry
-- If Redis is full, only those who follow now see the chunks.
if type(added) == 'table' then return added end
return {'ok'}
