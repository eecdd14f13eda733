--[[
  Note that a record is archived up to a version: give it its TTL if that is the current one, drop archived messages
  beyond the recent ones.
  KEYS  record  meta
  ARGV  epoch, version, ttl_ms, archived (messages below this number are in SQL), recent (how many stay)
  Returns {'ok'} | {'gone'} | {'epoch'}
]]
local record, meta = KEYS[1], KEYS[2]
local epoch, version, ttl_ms, archived, recent = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('HGET', meta, 'epoch') ~= epoch then return {'epoch'} end
local head = redis.call('HMGET', record, '#v', '#mn', '#md')
-- A record that is gone must not come back as a ghost of one field.
if not head[1] then return {'gone'} end
-- A TTL says that the record is archived whole. PEXPIRE is carried out even at maxmemory, and lets Redis evict.
if tonumber(head[1]) == version then redis.call('PEXPIRE', record, ttl_ms) end
local before = tonumber(head[3] or '0')
local lowest, keep_from = before, math.min(archived, tonumber(head[2] or '0') - recent)
while lowest < keep_from do
  local names, stop = {}, math.min(keep_from, lowest + 5000)
  for number = lowest, stop - 1 do names[#names + 1] = '#m' .. string.format('%d', number) end
  redis.call('HDEL', record, unpack(names))
  lowest = stop
end
if lowest > before then redis.pcall('HSET', record, '#md', string.format('%d', lowest)) end
return {'ok'}
