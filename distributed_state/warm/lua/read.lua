--[[
  Read a whole record, extend the TTL of an archived one, and leave a hydration token if the record is absent.
  KEYS  record  hydration  meta
  ARGV  data_id          of the connection: see port/identities.py
        epoch, version   what the caller has, '' = nothing
        token   the beginning of the hydration token that is left for an absent record
        ttl_ms  a TTL that exists is extended to this when a tenth of it is gone
  Returns {'ok', epoch, {field, value, ...}} | {'same', epoch} | {'cold', epoch, token} | {'uninitialised'}
        token '' = Redis is too full to leave one: the caller reads SQL and does not hydrate the record
]]
local record, hydration, meta = KEYS[1], KEYS[2], KEYS[3]
local data_id, epoch, version, token, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
-- @include clock
-- @include epoch
-- @include same_data
if not current then return {'uninitialised'} end
local ttl_left = redis.call('PTTL', record)
if ttl_left == -2 then -- absent
  -- @include hydration_token
  return {'cold', current, hydration_token}
end
if ttl_left >= 0 and ttl_left < ttl_ms * 0.9 then redis.call('PEXPIRE', record, ttl_ms, 'XX') end
if version ~= '' and epoch == current and redis.call('HGET', record, '#v') == version then return {'same', current} end
return {'ok', current, redis.call('HGETALL', record)}
