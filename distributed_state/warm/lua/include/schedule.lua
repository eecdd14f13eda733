--[[
  When a worker serves the session next. Operation 'D' of a session with a handler names it; its value is '' or
  'h'    the handler is set, unless the session has one
  'd'    a turn of the handler served what was due; 'r'    failures are forgotten
  'f MS' a turn of the handler failed, and is tried again after so many ms, 'f !' = never
  The field '#bh' has the handler, when it is due in ms ('-' = never), how many turns in a row failed, and when the next attempt
  may begin ('-' = at once, '!' = never).
  Expects  clock; call, words, record; entries, wakes, put, noted of inbox.lua; inputs, scheduled, ends_schedule of operations.lua
  Defines  due_at   as in '#bh', nil = the set stays as it is
           results has when it is due (-1 = never), how many turns failed, when the next attempt may begin (-1 = at once,
           -2 = never), and 1 if '#bh' was written
  Returns  {'handler', handler} if the session has one that the change does not name, or another one; or goes on
]]
local due_at
if inputs or scheduled or ends_schedule then
  local stored = call('HGET', record, '#bh')
  local mode, wait = string.match(scheduled and words[scheduled + 2] or '', '^(%a?) ?(.*)$')
  local handler, at, failed, retry = string.match(stored or '', '^(%S+) (%S+) (%d+) (%S+)$')
  if not handler and mode == 'h' then handler, at, failed, retry = words[scheduled + 1], '-', '0', '-' end
  if handler and not (scheduled and words[scheduled + 1] == handler) then return {'handler', handler} end
  if ends_schedule then -- '#bh' has gone with the inbox
    if handler then due_at = '-' end
    if scheduled then noted({'-1', '0', '-1', '0'}) end
  elseif handler then
    if mode == 'd' or mode == 'r' then failed, retry = '0', '-' end
    if mode == 'f' then
      failed, retry = format('%d', failed + 1), wait == '!' and '!' or format('%d', now_ms + wait)
    end
    local first = entries - #wakes > 0 and now_ms or math.huge
    -- The oldest is served first.
    if first == now_ms and mode ~= 'd' and mode ~= 'f' and at ~= '-' and at - now_ms < 0 then first = at + 0 end
    for _, wake in ipairs(wakes) do first = math.min(first, wake[2] + 0) end
    if first == math.huge then failed, retry = '0', '-' end -- what failed has gone
    if retry == '!' or first == math.huge then
      due_at = '-'
    else
      due_at = format('%d', math.max(first, retry == '-' and 0 or retry + 0))
    end
    local now_stored = handler .. ' ' .. due_at .. ' ' .. failed .. ' ' .. retry
    if now_stored ~= stored then put('#bh', now_stored) end
    noted({due_at == '-' and '-1' or due_at, failed, retry == '-' and '-1' or retry == '!' and '-2' or retry, now_stored ~= stored and '1' or '0'})
  elseif scheduled then
    noted({'-1', '0', '-1', '0'})
  end
end
