--[[
  Whether the journal ends where meta says, checked as often as same_data asks the server. After a slot was moved
  key by key while a node restarted it may be newer than meta: then no entry could be added, and a script would fail after
  all its other writes. Such a partition is recovered: see Recovery._is_mixed.
  Expects  same_data (current, age, written), offset, journal, meta
  Defines  current    nil if the journal goes on
]]
if current and (not age or age > 20 or age < 0)
  and redis.call('XRANGE', journal, format('%d', offset + 1) .. '-0', '+', 'COUNT', '1')[1] then
  redis.call('HSET', meta, 'life', '?', 'journal', string.match(written, '^%S+ %S+ %S+ %S+ %S+ ') .. '? 0')
  current = nil
end
