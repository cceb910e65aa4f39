-- Which optimizer updates which parameter. Every parameter has exactly one entry; overlap and
-- omission are errors that list the parameters.
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"
local optim = require "perigee.optim"
local schedule = require "perigee.schedule"

local routing = {}

local roles = { "embedding", "backbone", "head" }
routing.roles = roles
-- Metrics spell roles as the published code does.
routing.metric_names = { embedding = "input_embedding", backbone = "backbone", head = "lm_head" }

-- A pattern, a list of patterns, or a predicate -> predicate over parameters.
local function matcher(value, where, name)
  local allowed = "a Lua pattern, a list of patterns, or a function(parameter)"
  if type(value) == "function" then return value end
  if type(value) == "string" then value = { value } end
  if type(value) ~= "table" or #value == 0 then check.fail(where, name, value, allowed) end
  keys.check(value, {}, name, where, #value)
  for i, pattern in ipairs(value) do
    if type(pattern) ~= "string" then
      check.fail(where, ("%s[%d]"):format(name, i), pattern, "a Lua pattern")
    end
    local ok, message = pcall(string.find, "", pattern)
    if not ok then
      errors.at(where, "%s = %s is not a Lua pattern: %s", name, check.show(pattern), message)
    end
  end
  return function(parameter)
    for _, pattern in ipairs(value) do
      if parameter.name:find(pattern) then return true end
    end
    return false
  end
end

-- A selector { role=, match=, except= } -> predicate, and its text.
function routing.selector(options, where, label)
  local role, match, except = options.role, options.match, options.except
  if role == nil and match == nil then
    errors.at(where, "%s selects nothing: expected role = … or match = …", label)
  end
  local wanted, parts = nil, {}
  if role ~= nil then
    local list = type(role) == "table" and role or { role }
    if #list == 0 then check.fail(where, label .. ".role", role, "a role or a list of roles") end
    wanted = {}
    for _, r in ipairs(list) do wanted[check.one_of(where, label .. ".role", r, roles)] = true end
    parts[#parts + 1] = "role = " .. table.concat(list, "|")
  end
  local matches = match ~= nil and matcher(match, where, label .. ".match") or nil
  local excludes = except ~= nil and matcher(except, where, label .. ".except") or nil
  if match ~= nil then
    parts[#parts + 1] = "match = " .. (type(match) == "table" and table.concat(match, "|")
      or type(match) == "function" and "function" or match)
  end
  if except ~= nil then
    parts[#parts + 1] = "except = " .. (type(except) == "table" and table.concat(except, "|")
      or type(except) == "function" and "function" or except)
  end
  return function(parameter)
    if wanted and not wanted[parameter.role] then return false end
    if matches and not matches(parameter) then return false end
    if excludes and excludes(parameter) then return false end
    return true
  end, table.concat(parts, ", ")
end

local entry_keys = { "role", "match", "except", "schedule", "weight_decay_scale" }

-- Entries of a recipe, checked: { select, text, optimizer, schedule or nil, decay_scale, where }.
function routing.entries(list, where)
  check.table(where, "optimizers", list, "a list of { role = …, pg.optim.NAME{…} }")
  if #list == 0 then check.fail(where, "optimizers", list, "at least one entry") end
  keys.check(list, {}, "optimizers", where, #list)
  local entries = {}
  for i, item in ipairs(list) do
    local label = ("optimizers[%d]"):format(i)
    check.table(where, label, item, "{ role = … or match = …, pg.optim.NAME{…} }")
    if optim.is(item) then
      errors.at(item.where, "%s is an optimizer without a selection: expected "
        .. "{ role = … or match = …, pg.optim.%s{…} }", label, item.name)
    end
    keys.check(item, entry_keys, label, where, 1)
    local optimizer = item[1]
    if not optim.is(optimizer) then
      check.fail(where, label .. "[1]", optimizer, "an optimizer, pg.optim.NAME{…}")
    end
    local at = optimizer.where or where
    local select_one, text = routing.selector(item, at, label)
    entries[i] = {
      index = i, select = select_one, text = text, optimizer = optimizer, where = at,
      by_match = item.match ~= nil,
      schedule = item.schedule ~= nil
        and schedule.from(item.schedule, at, label .. ".schedule") or nil,
      decay_scale = item.weight_decay_scale ~= nil
        and check.one_of(at, label .. ".weight_decay_scale", item.weight_decay_scale,
          { "lr", "independent" })
        or optimizer.decay_scale,
    }
  end
  return entries
end

local function list_names(parameters)
  local names = {}
  for i, p in ipairs(parameters) do
    if i > 8 then
      names[i] = ("… and %d more"):format(#parameters - 8)
      break
    end
    names[i] = p.name
  end
  return table.concat(names, ", ")
end

-- Give every entry its parameters, in model order.
function routing.route(entries, parameters, where)
  for _, entry in ipairs(entries) do entry.parameters = {} end
  local missing = {}
  for _, parameter in ipairs(parameters) do
    local owner
    for _, entry in ipairs(entries) do
      if entry.select(parameter) then
        if owner then
          local both = {}
          for _, p in ipairs(parameters) do
            if owner.select(p) and entry.select(p) then both[#both + 1] = p end
          end
          errors.at(entry.where, "optimizers[%d] (%s) and optimizers[%d] (%s) overlap: %s; "
            .. "expected every parameter exactly once", owner.index, owner.text, entry.index,
            entry.text, list_names(both))
        end
        owner = entry
      end
    end
    if owner then
      owner.parameters[#owner.parameters + 1] = parameter
    else
      missing[#missing + 1] = parameter
    end
  end
  if #missing > 0 then
    errors.at(where, "optimizers: no entry updates %s; expected every parameter exactly once "
      .. "(pg.optim.frozen() for those that stay)", list_names(missing))
  end
  for _, entry in ipairs(entries) do
    -- A role without parameters is a property of the model (no blocks); a pattern that matches
    -- nothing is a mistake.
    if #entry.parameters == 0 and entry.by_match then
      errors.at(entry.where, "optimizers[%d] (%s) matches no parameter", entry.index, entry.text)
    end
  end
  return entries
end

-- Rows for config.json and for the table that is printed before update 1. Blocks that are alike
-- are one row: "model.layers.{0…3}.mlp.up_proj.weight".
function routing.rows(entries, default_schedule, total)
  local rows, by_key = {}, {}
  for _, entry in ipairs(entries) do
    local decay = entry.optimizer.hypers.weight_decay
    for _, p in ipairs(entry.parameters) do
      local pattern = p.name:gsub("%.layers%.%d+%.", ".layers.*.")
      local key = ("%d %s %d %d"):format(entry.index, pattern, p.rows, p.columns)
      local row = by_key[key]
      if not row then
        row = {
          parameter = pattern, count = 0, rows = p.rows, columns = p.columns, role = p.role,
          optimizer = entry.optimizer.name, settings = entry.optimizer:describe(),
          peak_lr = entry.optimizer:peak(0, total), decay = decay,
          decay_scale = entry.decay_scale,
          schedule = (entry.schedule or default_schedule):describe(),
        }
        row.scale = entry.optimizer:factor(p.rows, p.columns)
        by_key[key] = row
        rows[#rows + 1] = row
      end
      row.count = row.count + 1
    end
  end
  return rows
end

function routing.table_text(rows)
  local lines = { { "parameter", "shape", "optimizer", "peak lr", "factor", "decay" } }
  for _, row in ipairs(rows) do
    local frozen = row.optimizer == "frozen"
    local decay = row.decay
    lines[#lines + 1] = {
      row.count > 1 and ("%s (%d)"):format(row.parameter, row.count) or row.parameter,
      ("%d x %d"):format(row.rows, row.columns), row.optimizer,
      frozen and "-" or check.show(row.peak_lr),
      frozen and "-" or ("%.4g"):format(row.scale),
      (frozen or decay == nil) and "-" or type(decay) == "function" and "function"
        or check.show(decay) .. (row.decay_scale == "independent" and " indep." or ""),
    }
  end
  local widths = {}
  for _, line in ipairs(lines) do
    for i, cell in ipairs(line) do widths[i] = math.max(widths[i] or 0, #cell) end
  end
  local out = {}
  for _, line in ipairs(lines) do
    local cells = {}
    for i, cell in ipairs(line) do cells[i] = cell .. (" "):rep(widths[i] - #cell) end
    out[#out + 1] = "  " .. table.concat(cells, "  "):gsub("%s+$", "")
  end
  return table.concat(out, "\n") .. "\n"
end

return routing
