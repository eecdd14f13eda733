--[[
  Put a replica on the roll of live replicas for a while, and keep its report.
  KEYS  roll  replica
  ARGV  id, report
        ttl_ms    it counts as lost after this time
  Returns {'ok', replicas, id of one that is due, ...}
        | {'late', replicas}   the replica itself was late. Others may be late for the same reason, so it must not report them as lost
]]
local roll, replica = KEYS[1], KEYS[2]
local id, report, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
local before = redis.call('ZSCORE', roll, id)
-- After a first write that takes no memory even a full Redis accepts the rest. Otherwise all replicas would count as
-- lost. Reports are small, and have no expiry: with maxmemory-policy volatile-lru a full Redis would evict them.
redis.call('PERSIST', replica)
redis.call('ZADD', roll, format('%d', now_ms + ttl_ms), id)
redis.call('SET', replica, report)
local members = redis.call('ZCARD', roll)
if not before or tonumber(before) <= now_ms then return {'late', members} end
-- At most 100: when these are off the roll, the next beat finds more.
return {'ok', members, unpack(redis.call('ZRANGEBYSCORE', roll, '-inf', format('%d', now_ms), 'LIMIT', 0, 100))}
