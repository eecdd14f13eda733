--[[
  Prove a link: tell its replica, through the channel on which it listens, when it asked this. That a script which
  writes was carried out shows that the server may still change what is heard from it; an isolated primary or a former
  one refuses it, and would let a bare SPUBLISH through.
  KEYS  meta  echoes
  ARGV  sent    by the replica's monotonic clock
  Returns {'ok', seconds, microseconds}   the server's clock
]]
local meta, echoes = KEYS[1], KEYS[2]
local sent = ARGV[1]
-- It changes nothing, and takes no memory: a full Redis carries it out.
redis.call('PERSIST', meta)
local now = redis.call('TIME')
redis.call('SPUBLISH', echoes, (redis.call('HGET', meta, 'epoch') or '') .. ' ' .. sent)
return {'ok', now[1], now[2]}
