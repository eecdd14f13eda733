--[[
  Set the time at which a record is due next, unless that time was changed meanwhile: see due.lua.
  KEYS  due
  ARGV  member
        seen    the score that it was found with
        score   in ms, '' = never again
  Returns {'ok'} | {'changed'}
]]
local due = KEYS[1]
local member, seen, score = ARGV[1], ARGV[2], ARGV[3]
if tonumber(redis.call('ZSCORE', due, member) or '-1') ~= tonumber(seen) then return {'changed'} end
if score == '' then redis.call('ZREM', due, member) else redis.call('ZADD', due, score, member) end
return {'ok'}
