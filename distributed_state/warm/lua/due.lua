--[[
  The members of a partition's set that are due, the most overdue first: records whose lifetimes are to be checked, or
  sessions that a worker with their handler serves.
  KEYS  due  meta
  ARGV  most     how many at most
        field    of the meta that has the epoch for which the set was filled
        ahead_ms    how far the returned members are moved ahead, so that others do not find them now; '' = not at all
  Returns {'ok', epoch, epoch that the set was filled for | '', now_ms, {member, score, ...}, the next score | ''}
          the scores are those that the members have now; the next score only if none is due
        | {'uninitialised'}
]]
local due, meta = KEYS[1], KEYS[2]
local most, field, ahead_ms = ARGV[1], ARGV[2], ARGV[3]
local place = redis.call('HMGET', meta, 'epoch', field)
if not place[1] then return {'uninitialised'} end
-- @include clock
local at = format('%d', now_ms)
local found = redis.call('ZRANGEBYSCORE', due, '-inf', at, 'WITHSCORES', 'LIMIT', 0, most)
if ahead_ms ~= '' then
  local later = format('%d', now_ms + ahead_ms)
  for i = 1, #found, 2 do
    redis.call('ZADD', due, later, found[i])
    found[i + 1] = later
  end
end
local next = not found[1] and redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
return {'ok', place[1], place[2] or '', at, found, next or ''}
