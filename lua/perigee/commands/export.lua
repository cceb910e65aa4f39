-- perigee export DIR: what other programs read
local checkpoints = require "perigee.checkpoints"
local core = require "perigee.core"
local errors = require "perigee.errors"
local tensors = require "perigee.tensors"

local command = {
  name = "export", usage = "export DIR [--format csv|npy|safetensors] [--out FILE]",
  description = "csv: the metrics of a run directory as a table with a line per update, for "
    .. "pandas, R or Weights & Biases. npy, safetensors: the head's matrix of a checkpoint, or of "
    .. "the latest one of a run directory, a row per token.",
  positional = { 1, 1 },
  options = {
    { name = "format", value = "FORMAT", choices = { "csv", "npy", "safetensors" },
      help = "csv (default), npy or safetensors" },
    { name = "out", value = "FILE", help = "where to (default of csv: standard output)" },
  },
}

local step = "progress/update"

-- The last line of each update by rising update, and the names in order of appearance.
local function read(path)
  local by_update, updates, names, known = {}, {}, { step }, { [step] = true }
  local number = 0
  for line, ending in errors.try(core.fs.read(path)):gmatch("([^\n]*)(\n?)") do
    number = number + 1
    if ending == "" then break end -- a line that is being written
    local value, why = core.json.decode(line)
    if type(value) ~= "table" then
      errors.world(("EFORMAT: %s:%d is not a line of metrics: %s"):format(path, number,
        why or "expected a JSON object"), "EFORMAT")
    end
    local update = math.type(value[step]) == "integer" and value[step]
    if update then
      if not by_update[update] then updates[#updates + 1] = update end
      by_update[update] = value
      local fresh = {}
      for name in pairs(value) do
        if not known[name] and name ~= "nonfinite" then fresh[#fresh + 1] = name end
      end
      table.sort(fresh)
      for _, name in ipairs(fresh) do
        known[name], names[#names + 1] = true, name
      end
    end
  end
  table.sort(updates)
  return by_update, updates, names
end

-- One field, as RFC 4180 has it; nothing where there is no value or it was not finite.
local function field(value)
  if value == nil or value == core.json.null then return "" end
  local text = type(value) == "string" and value or core.json.encode(value)
  if text:find('[",\r\n]') then text = '"' .. text:gsub('"', '""') .. '"' end
  return text
end

local function csv(directory)
  local path = directory .. "/metrics.jsonl"
  if core.fs.kind(path) ~= "file" then
    errors.world(("ENOENT: %s is missing: expected a run directory"):format(path), "ENOENT")
  end
  local by_update, updates, names = read(path)
  local lines, row = {}, {}
  for i, name in ipairs(names) do row[i] = field(name) end
  lines[1] = table.concat(row, ",")
  for _, update in ipairs(updates) do
    for i, name in ipairs(names) do row[i] = field(by_update[update][name]) end
    lines[#lines + 1] = table.concat(row, ",")
  end
  return table.concat(lines, "\n") .. "\n"
end

function command.run(options, positional)
  local format, out = options.format or "csv", options.out
  if format == "csv" then
    local text = csv(positional[1])
    if out then
      errors.try(core.fs.write(out, text))
    else
      io.stdout:write(text)
    end
    return 0
  end
  if not out then errors.usage("export --format %s: expected --out FILE", format) end
  if out:sub(-#format - 1) ~= "." .. format then
    errors.usage("--out %q is not allowed: expected a name that ends in .%s", out, format)
  end
  local ctx <close> = errors.try(core.context { device = "cpu" })
  local path = checkpoints.resolve(ctx, positional[1])
  local head <close> = errors.try(tensors.load(path .. "/model.safetensors",
    "lm_head.weight", ctx))
  errors.try(head:save(out))
  return 0
end

return command
