--[[
  Set the time of the next check of a record's lifetime, unless that time was changed meanwhile.
  KEYS  lifetimes
  ARGV  member
        seen    the score that it was found with
        score   in ms, '' = never again
  Returns {'ok'} | {'changed'}
]]
local lifetimes = KEYS[1]
local member, seen, score = ARGV[1], ARGV[2], ARGV[3]
if tonumber(redis.call('ZSCORE', lifetimes, member) or '-1') ~= tonumber(seen) then return {'changed'} end
if score == '' then redis.call('ZREM', lifetimes, member) else redis.call('ZADD', lifetimes, score, member) end
return {'ok'}
