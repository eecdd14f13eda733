--[[
  The beginning of each read of a record's items: extend the TTL of the record and its items, if the record is here.
  Expects  same_data (current); call, record, items, ttl_ms
  Defines  version, epoch    for item_window.lua
  Returns  {'cold', epoch} | {'uninitialised'}
]]
if not current then return {'uninitialised'} end
local version, epoch = call('HGET', record, '#v'), current
if not version then return {'cold', epoch} end
local lasts, window_lasts = call('PTTL', record), call('PTTL', items)
if lasts >= 0 and lasts < ttl_ms * 0.9 then call('PEXPIRE', record, ttl_ms, 'XX') end
if window_lasts >= 0 and window_lasts < ttl_ms * 0.9 then call('PEXPIRE', items, ttl_ms, 'XX') end
