--[[
  The records of a partition whose lifetimes are due for a check, the most overdue first.
  KEYS  lifetimes  meta
  ARGV  most    how many at most
  Returns {'ok', epoch, epoch that the set was filled for | '', now_ms, {member, score, ...}, the next score | ''}
          the next score only if none is due
        | {'uninitialised'}
]]
local lifetimes, meta = KEYS[1], KEYS[2]
local most = ARGV[1]
local place = redis.call('HMGET', meta, 'epoch', 'lifetimes')
if not place[1] then return {'uninitialised'} end
-- @include clock
local at = format('%d', now_ms)
local due = redis.call('ZRANGEBYSCORE', lifetimes, '-inf', at, 'WITHSCORES', 'LIMIT', 0, most)
local next = not due[1] and redis.call('ZRANGE', lifetimes, 0, 0, 'WITHSCORES')[2]
return {'ok', place[1], place[2] or '', at, due, next or ''}
