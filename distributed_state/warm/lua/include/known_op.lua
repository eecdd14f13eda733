--[[
  Whether an op id was applied before. Op ids are kept per replica as 'replica oldest time sequence:version:digest:first,results
  ...', joined by ';'. A replica says with each commit which of its sequences is the oldest without an answer. Earlier ones are
  dropped, and refused if they come late. With many in flight they are dropped in larger groups, so that the cost does not grow.
  '@ms;' before the groups says that op ids of commits up to that time are only in SQL: the record was hydrated then, or it was
  archived up to then with more op ids than fit into one small field.
  Expects  clock, written; replica, sequence, oldest, digest, since, epoch, window_ms
           ops    all op ids of the record, false = none: see op_pieces
  Defines  since         as a number
           others        what is kept of other replicas: '@ms;' and groups
           mine, mine_oldest    the sequences that are kept of this replica, and the oldest one
  Returns  the answer that was given when it was applied, {'forgotten'}, {'misused', version}, {'late', ms, epoch},
           {'unsure', ms, epoch}, or goes on
]]
local others, mine, mine_oldest, hydrated = '', '', oldest, 0
if ops then
  if string.byte(ops) == 64 then -- @
    local came, groups = string.match(ops, '^@(%d+);(.*)$')
    hydrated, ops = came + 0, groups
    if now_ms - hydrated <= window_ms then others = '@' .. came .. ';' end
  end
  -- Usually there is only one, which is this replica's and answered, so no search is needed.
  local only, last = string.match(ops, '^(%S+) %d+ %d+ (%d+):[^ ;]*$')
  if only ~= replica or oldest - last <= 0 then
    for who, first, time, rest in string.gmatch(ops, '([^; ]+) (%d+) (%d+)([^;]*)') do
      if who == replica then
        local dropped = oldest - first
        -- A sequence is never before the oldest one that is sent with it.
        if dropped < 0 and sequence - first < 0 then return {'forgotten'} end
        local at = string.find(rest, ' ' .. sequence .. ':', 1, true)
        if at then
          local v, d, message, results = string.match(rest, '^ %d+:(%d+):(%w*):([^, ]*),?(%S*)', at)
          if d ~= digest then return {'misused', v} end
          return 'ok ' .. v .. ' ' .. epoch .. ' ' .. message .. ' ' .. results .. ' ' .. offset
        end
        if dropped < 0 or #rest >= 200 and dropped <= 64 then
          mine, mine_oldest = rest, first
        else
          local left = {}
          for op, s in string.gmatch(rest, '( (%d+):%S+)') do
            if s - oldest >= 0 then left[#left + 1] = op end
          end
          mine = table.concat(left)
        end
      elseif time * 1000 + window_ms >= now_ms - 1000 then
        others = others .. who .. ' ' .. first .. ' ' .. time .. rest .. ';'
      end
    end
  end
end
-- It is not among them, so the write was not applied after `since`, unless an op id of that time may have been dropped.
since = since + 0
if now_ms - since > window_ms then return {'late', format('%d', now_ms), epoch} end
if since < hydrated then return {'unsure', format('%d', now_ms), epoch} end
