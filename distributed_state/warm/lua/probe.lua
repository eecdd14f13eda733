--[[
  Prove that a link works: publish the time of the request on the channel to which its replica is subscribed. The script writes,
  because only a server that accepts writes may send notices: an isolated or former primary refuses the script, but would
  execute a single SPUBLISH.
  KEYS  meta  echoes
  ARGV  data_id of the connection: see port/identities.py
        sent    by the replica's monotonic clock
  Returns {'ok', seconds, microseconds}   the server's clock
        | {'other'}   the data of the server has another id than when the connection was made
]]
local meta, echoes = KEYS[1], KEYS[2]
local data_id, sent = ARGV[1], ARGV[2]
-- @include clock
-- @include epoch
-- @include same_data
if not same then return {'other'} end
-- A write that changes nothing and takes no memory: a full Redis accepts it.
redis.call('PERSIST', meta)
redis.call('SPUBLISH', echoes, (current or '') .. ' ' .. sent)
return {'ok', now[1], now[2]}
