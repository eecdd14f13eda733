--[[
  Append an entry to the output of a turn, and publish it. Its id is the holder's token and the number of its last chunk.
  Expects  output_newest; call, format; output, output_channel; output_ttl (ms)
           number   of the entry, as text; a greater one is taken if the stream has it already
           count, tag      how many chunks it has, and the tag of the request
           how             'c' chunks, 'e' the end
           content
  Defines  head     of the entry, which Entry.parse reads
           added    the answer of XADD, perhaps an error
]]
total, number = total + size, format('%d', math.max(number + 0, last + 1))
local head = format('%d', total) .. ' ' .. format('%d', floor) .. ' ' .. count .. ' ' .. tag .. ' ' .. how
-- It fails if Redis is full, or if the stream has entries of a later holder, as after a failover. The caller may have
-- written already.
local added = redis.pcall('XADD', output, token .. '-' .. number, 'h', head, 'd', content)
call('PEXPIRE', output, output_ttl)
call('SPUBLISH', output_channel, token .. ' ' .. number .. ' ' .. count .. ' ' .. tag .. ' ' .. how .. '\n' .. content)
