--[[
  Take or keep the right to archive a partition.
  KEYS  archiver
  ARGV  replica, ttl_ms
  Returns {'ok'} | {'taken', replica}
]]
local archiver = KEYS[1]
local replica, ttl_ms = ARGV[1], ARGV[2]
local holder = redis.call('GET', archiver)
if holder and holder ~= replica then return {'taken', holder} end
redis.call('SET', archiver, replica, 'PX', ttl_ms)
return {'ok'}
