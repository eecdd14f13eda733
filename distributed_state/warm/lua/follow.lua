--[[
  The holder of a session's lock, and the next entries of the output, for a follower of its turns.
  KEYS  lock  meta  output  stop
  ARGV  data_id   of the connection: see port/identities.py
        after     the id of the last entry that the follower has, '=' and an id to receive that one, too, '' = begin with the
                  present holder's first, '*' = with the first of all
        count     the most entries to return
  Returns {'ok', lock_value, stop, begin, id, head, content, ...} | {'uninitialised'}
          lock_value is '' if there is no holder. stop: the last one, as stop.lua writes it, '' = none. begin: the id after
          which the entries follow, for the next call
]]
local lock, meta, output, stop = unpack(KEYS)
local data_id, after, count = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
local holder = call('GET', lock) or ''
-- A lock of another epoch was granted before Redis lost data, and is no longer valid.
if not string.find(holder, '@' .. current .. ':', 1, true) then holder = '' end
if after == '' then
  local token = string.match(holder, '^%a(%d+)')
  local newest = not token and call('XREVRANGE', output, '+', '-', 'COUNT', 1)[1]
  after = token and token .. '-0' or newest and newest[1] or '0-0'
end
local from = '(' .. after
if after == '*' then from, after = '-', '0-0' end
if string.byte(after) == 61 then -- =
  after = string.sub(after, 2)
  from = after
end
local words = {}
for _, entry in ipairs(call('XRANGE', output, from, '+', 'COUNT', count)) do
  local n = #words
  words[n + 1], words[n + 2], words[n + 3] = entry[1], entry[2][2], entry[2][4]
end
return {'ok', holder, call('GET', stop) or '', after, unpack(words)}
