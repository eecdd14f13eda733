--[[
  Tell that a replica is there: onto the roll of replicas until it counts as lost, with what it reports of itself.
  KEYS  roll  replica
  ARGV  id, report
        ttl_ms    counts as lost so long after this
        kept_ms   its report is kept so long after this
  Returns {'ok', replicas, id of one that is due, ...}
        | {'late', replicas}   it was not on the roll in time itself: as it may be with others, it must not judge them
]]
local roll, replica = KEYS[1], KEYS[2]
local id, report, ttl_ms, kept_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include clock
local before = redis.call('ZSCORE', roll, id)
-- First what takes no memory, so that a full Redis lets the rest be done: else all replicas would count as lost. What each
-- reports is small.
redis.call('PEXPIRE', replica, kept_ms)
redis.call('ZADD', roll, format('%d', now_ms + ttl_ms), id)
redis.call('SET', replica, report, 'PX', kept_ms)
local members = redis.call('ZCARD', roll)
if not before or tonumber(before) <= now_ms then return {'late', members} end
-- Bounded: more are found at the next beat, when these are off the roll.
return {'ok', members, unpack(redis.call('ZRANGEBYSCORE', roll, '-inf', format('%d', now_ms), 'LIMIT', 0, 100))}
