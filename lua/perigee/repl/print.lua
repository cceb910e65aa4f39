-- Values as a person reads them, and as one JSON value. Nothing here raises: an object whose
-- __tostring fails is shown as such.
local core = require "perigee.core"
local tensors = require "perigee.tensors"

local show = { is_tensor = tensors.is }

local widest = 88

-- The shortest form that reads back as the same number, as a whole or with a point.
function show.number(x)
  if math.type(x) == "integer" then return tostring(x) end
  if x ~= x then return "nan" end
  if x == math.huge or x == -math.huge then return x > 0 and "inf" or "-inf" end
  for _, format in ipairs { "%.14g", "%.15g", "%.16g", "%.17g" } do
    local text = format:format(x):gsub(",", ".")
    if tonumber(text) == x then
      return text:find("[.eE]") and text or text .. ".0"
    end
  end
end

-- In quotes, with escapes for what would spoil a line; long ones are cut.
function show.quoted(text, most)
  most = most or 120
  local cut = #text > most
  if cut then text = text:sub(1, utf8.offset(text, 0, most + 1) - 1) end
  local valid = utf8.len(text)
  text = text:gsub('[%c"\\' .. (valid and "" or "\128-\255") .. "]", function(c)
    local known = { ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r", ['"'] = '\\"',
      ["\\"] = "\\\\" }
    return known[c] or ("\\x%02x"):format(c:byte())
  end)
  return ('"%s%s"'):format(text, cut and "…" or "")
end

local function protected(f, ...)
  local ok, text = pcall(f, ...)
  if ok and type(text) == "string" then return text end
  return "(cannot be shown: " .. tostring(text):gsub("\n.*", "") .. ")"
end

-- ---- tables --------------------------------------------------------------------------------

local function key_order(a, b)
  local ka, kb = type(a), type(b)
  if ka ~= kb then return ka < kb end
  if ka == "number" or ka == "string" then return a < b end
  return tostring(a) < tostring(b)
end

local function key_text(key)
  if type(key) == "string" and key:match("^[%a_][%w_]*$") then return key end
  return ("[%s]"):format(show.brief(key))
end

-- Inside a table: one line.
function show.brief(value)
  local kind = type(value)
  if kind == "number" then return show.number(value) end
  if kind == "string" then return show.quoted(value, 60) end
  local meta = debug.getmetatable(value)
  if kind == "table" and not (type(meta) == "table" and meta.__tostring) then
    local count = 0
    for _ in next, value do count = count + 1 end
    return count == 0 and "{}" or ("{… %d}"):format(count)
  end
  return (protected(tostring, value):gsub("\n.*", " …"))
end

local most_entries = 40

function show.table(value)
  local entries, shown = {}, {}
  local length = #value
  for i = 1, math.min(length, most_entries) do
    shown[i] = true
    entries[i] = show.brief(rawget(value, i))
  end
  local keys, left = {}, math.max(0, length - most_entries)
  for key in next, value do
    local listed = math.type(key) == "integer" and key >= 1 and key <= length
    if not listed and not shown[key] then keys[#keys + 1] = key end
  end
  table.sort(keys, key_order)
  for i, key in ipairs(keys) do
    if #entries < most_entries then
      entries[#entries + 1] = key_text(key) .. " = " .. show.brief(value[key])
    else
      left = left + #keys - i + 1
      break
    end
  end
  if left > 0 then entries[#entries + 1] = ("… %d more"):format(left) end
  if #entries == 0 then return "{}" end
  local line = "{ " .. table.concat(entries, ", ") .. " }"
  if #line <= widest then return line end
  -- Plain numbers fill lines; everything else gets one each.
  if #keys == 0 and type(value[1]) == "number" then
    local lines, current = {}, "  "
    for _, entry in ipairs(entries) do
      if #current + #entry + 2 > widest then
        lines[#lines + 1] = current
        current = "  "
      end
      current = current .. entry .. ", "
    end
    lines[#lines + 1] = current
    return "{\n" .. table.concat(lines, "\n") .. "\n}"
  end
  return "{\n  " .. table.concat(entries, ",\n  ") .. "\n}"
end

-- A result at the prompt.
function show.value(value)
  local kind = type(value)
  if kind == "string" then return value end
  if kind == "number" then return show.number(value) end
  local meta = debug.getmetatable(value)
  if kind == "table" and not (type(meta) == "table" and meta.__tostring) then
    return protected(show.table, value)
  end
  return protected(tostring, value)
end

-- Several results: what fits stands on one line.
function show.values(values)
  local texts, total = {}, 0
  for i = 1, values.n do
    texts[i] = show.value(values[i])
    total = total + #texts[i] + 1
    if texts[i]:find("\n", 1, true) then total = math.huge end
  end
  return table.concat(texts, total <= widest and "\t" or "\n")
end

-- ---- JSON ----------------------------------------------------------------------------------

local most_elements, deepest = 65536, 8

local function plain(value, depth, open)
  local kind = type(value)
  if kind == "boolean" or kind == "nil" then return value end
  if kind == "number" then
    if value ~= value or value == math.huge or value == -math.huge then
      return show.number(value) -- JSON has no such number
    end
    return value
  end
  if kind == "string" then return utf8.len(value) and value or show.quoted(value, #value) end
  if show.is_tensor(value) then
    local ok, result = pcall(function()
      return { shape = core.json.array(value:shape()), dtype = value:dtype(),
        values = value:elements() <= most_elements and plain(value:to_table(), depth, open)
          or nil }
    end)
    return ok and result or tostring(value)
  end
  if kind ~= "table" or depth > deepest or open[value] then
    return protected(tostring, value)
  end
  open[value] = true
  local out, count = {}, 0
  for _ in next, value do count = count + 1 end
  if count == #value and count > 0 then
    for i = 1, count do
      out[i] = plain(value[i], depth + 1, open)
    end
    core.json.array(out)
  else
    for key, entry in next, value do
      local name = type(key) == "string" and key or show.brief(key)
      if type(entry) ~= "function" then
        out[utf8.len(name) and name or show.quoted(name)] = plain(entry, depth + 1, open)
      end
    end
  end
  open[value] = nil
  return out
end

-- { ok, values | error, trace } as one line.
function show.json(outcome)
  if not outcome.ok then
    return core.json.encode { ok = false, error = outcome.error, trace = outcome.trace,
      reason = outcome.reason }
  end
  local values = {}
  for i = 1, outcome.values.n do
    local value = plain(outcome.values[i], 1, {})
    values[i] = value == nil and core.json.null or value
  end
  return core.json.encode { ok = true, values = core.json.array(values) }
end

return show
