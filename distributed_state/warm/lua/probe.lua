--[[
  Prove a link: tell its replica, through the channel on which it listens, when it asked this. That a script which
  writes was carried out shows that the server may still change what is heard from it; an isolated primary or a former
  one refuses it, and would let a bare SPUBLISH through.
  KEYS  meta  echoes
  ARGV  life    of the connection: see port/lives.py
        sent    by the replica's monotonic clock
  Returns {'ok', seconds, microseconds}   the server's clock
        | {'other'}   the server is in another life than when the connection was made
]]
local meta, echoes = KEYS[1], KEYS[2]
local life, sent = ARGV[1], ARGV[2]
-- @include clock
-- @include epoch
-- @include same_data
if not same then return {'other'} end
-- It changes nothing, and takes no memory: a full Redis carries it out.
redis.call('PERSIST', meta)
redis.call('SPUBLISH', echoes, (current or '') .. ' ' .. sent)
return {'ok', now[1], now[2]}
