--[[
  The window of a record's items: the newest of them, in a hash of their own. All other items are in SQL, and so are all in
  a window with a TTL, which Redis may evict. Its fields: ':' and a name = 'number version ' and the frame, an empty one of a
  deleted item; 'k' and a number = 'version size ' and the name, the log by which items leave the window; '#e' epoch, '#n'
  the last number, '#d' the first that may be left, '#c' how many items, '#b' their bytes, '#f' the floor: each item that
  changed above this version is here; '#u' below lie items that the window never had, '2' = also of its own layer; '#h' and a
  collection = '=' and the greatest key below, '-' if there is none. A name is collection, NUL and key.
  Expects  byte_order; call, record, items, epoch, version (of the record, false = absent)
  Defines  layer_from    since which version the present layer holds, '' if the record never had items
           bare     whether nothing was put in that layer, and none lies below
           window   the head of the window, nil if it is not here
           needed   the caller must have read items in SQL at this version or a later one, a number
           sql_versions  versions of items read in SQL, by name; the caller adds to them
           greatest      greatest keys read in SQL, by collection; the caller adds to them
           top(collection)        the greatest key below
           stamp(name, held)      the version of an item, '-' if there is none, nil if only SQL knows
]]
local about = version and call('HMGET', record, '#items', '#kv') or {}
local layer_from, base = string.match(about[1] or '', '^(%d*) ?(%d*)')
local window = layer_from ~= '' and call('HMGET', items, '#e', '#n', '#d', '#c', '#b', '#f', '#u')
if window and window[1] ~= epoch then window = nil end
local needed = math.max((window and window[6] or about[2] or 0) + 0, (layer_from ~= '' and layer_from or 0) + 0)
local bare = layer_from == '' or base == '0' and not about[2]
local sql_versions, greatest = {}, {}
local function top(collection)
  if window and not greatest[collection] then greatest[collection] = call('HGET', items, '#h' .. collection) end
  return greatest[collection]
end
local function stamp(name, held)
  if held then
    local version, frame = string.match(held, '^%d+ (%d+) ()')
    return #held >= frame and version or '-'
  end
  if bare then return '-' end
  local middle = string.find(name, '\0', 1, true)
  local highest = top(string.sub(name, 1, middle - 1))
  if highest then
    if highest == '-' or behind(string.sub(name, middle + 1), string.sub(highest, 2)) then return '-' end
  elseif window and not window[7] then
    return '-'
  end
  return sql_versions[name]
end
