-- The Lua half of tools/quickstart.
--   perigee run tools/quickstart.lua --validation DATA        validation tokens that DATA allows
--   perigee run tools/quickstart.lua ADAMW_RUN ROWNORM_RUN    what the two trainings did
local core = require "perigee.core"

-- Sequences and micro-batch of recipes/quickstart.lua: validation takes whole micro-batches.
local group, wanted = 8 * 128, 65536

local function read_json(path) return core.json.decode(assert(core.fs.read(path))) end

local function print_validation(data)
  local held = read_json(data .. "/dataset.json").tokens.val
  local tokens = math.min(wanted, (held - 1) // group * group)
  if tokens < group then
    io.stderr:write(("error: the text is too short: it leaves %d validation tokens, the quickstart "
      .. "needs %d; give --text more text\n"):format(held, group + 1))
    os.exit(1)
  end
  print(tokens)
end

local function last_values(directory)
  local values = {}
  for line in io.lines(directory .. "/metrics.jsonl") do
    for name, value in pairs(core.json.decode(line)) do values[name] = value end
  end
  return values
end

local function display(text)
  return '"' .. text:gsub("%c", function(c) return ("\\x%02x"):format(c:byte()) end) .. '"'
end

local function pair_text(values)
  local pair = values["diagnostics/lm_head_step/diameter_text"]
  if not pair then return "none" end
  return display(pair[1]) .. " and " .. display(pair[2])
end

local function print_table(adamw, rownorm)
  local a, b = last_values(adamw), last_values(rownorm)
  local rows = {
    { "validation loss", "validation/loss", "%.4f" },
    { "row diameter of the last increment", "diagnostics/lm_head_step/diameter_exact", "%.3e" },
    { "Hilbert RMS of the last increment", "validation/hilbert_step/rms", "%.3e" },
  }
  print(("After update %d %21s %12s %15s"):format(a["progress/update"], "adamw", "rownorm",
    "adamw/rownorm"))
  for _, row in ipairs(rows) do
    local x, y = a[row[2]], b[row[2]]
    print(("%-36s %12s %12s %14.2fx"):format(row[1], row[3]:format(x), row[3]:format(y), x / y))
  end
  print()
  print("The two tokens whose log odds the last update moved most, per unit of hidden state:")
  print("  adamw    " .. pair_text(a))
  print("  rownorm  " .. pair_text(b))
  print()
  print("Next:")
  print("  build/perigee generate " .. rownorm .. ' --prompt "In the beginning"')
  print("  build/perigee eval " .. adamw .. "/checkpoints/* " .. rownorm .. "/checkpoints/*")
  print("  edit recipes/quickstart.lua, then build/perigee train recipes/quickstart.lua")
end

if arg[1] == "--validation" then print_validation(arg[2]) else print_table(arg[1], arg[2]) end
