-- What the specs of the Lua layer share: temporary folders, small data sets, the program.
local core = require "perigee.core"

local support = { core = core }

support.build = os.getenv "PERIGEE_BUILD" or "./build"
support.root = assert(core.fs.cwd())
if support.build:sub(1, 1) ~= "/" then support.build = support.root .. "/" .. support.build end
support.program = support.build .. "/perigee"
support.golden = support.root .. "/tests/golden/trajectory"

-- ---- folders ---------------------------------------------------------------------------------

local folders = {}

function support.folder()
  local name = os.tmpname()
  os.remove(name)
  name = name:gsub("lua_", "perigee-")
  assert(core.fs.make_exclusive(name))
  folders[#folders + 1] = name
  return name
end

function support.clean()
  for _, name in ipairs(folders) do core.fs.remove(name) end
  folders = {}
end

function support.write(path, text)
  assert(core.fs.write(path, text))
  return path
end

function support.read(path) return assert(core.fs.read(path)) end

function support.json(path) return assert(core.json.decode(support.read(path))) end

-- Lines of a metrics.jsonl: all of them, and the last one per update.
function support.metrics(directory)
  local lines, by_update = {}, {}
  for line in support.read(directory .. "/metrics.jsonl"):gmatch("[^\n]+") do
    local value = assert(core.json.decode(line))
    lines[#lines + 1] = value
    if value["progress/update"] then by_update[value["progress/update"]] = value end
  end
  return lines, by_update
end

-- ---- data ------------------------------------------------------------------------------------

-- A shard of tokens made by f(i), i = 0 …
function support.shard(path, count, f)
  local parts = { string.pack("<i4i4i4", 20240520, 1, count), ("\0"):rep(1024 - 12) }
  for i = 0, count - 1 do parts[#parts + 1] = string.pack("<I2", f(i)) end
  support.write(path, table.concat(parts))
end

-- A folder with two training shards and a validation shard over 97 tokens.
function support.data(folder)
  folder = folder or (support.folder() .. "/data")
  assert(core.fs.make(folder))
  local function tokens(shift)
    return function(i) return (i * i // 7 + 3 * i + shift) % 97 end
  end
  support.shard(folder .. "/text_train_000001.bin", 3000, tokens(1))
  support.shard(folder .. "/text_train_000002.bin", 2000, tokens(5))
  support.shard(folder .. "/text_val_000000.bin", 1500, tokens(9))
  support.write(folder .. "/dataset.json", '{"vocab": 97}\n')
  return folder
end

-- A small recipe on `data`; `changes` go through recipe:with.
function support.recipe(pg, data, changes)
  local base = pg.recipe {
    name = "small", seed = 1,
    model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8 },
    data = pg.data.shards { path = data },
    batch = { sequences = 4, micro = 2 },
    updates = 12, log = { every = 4 },
    schedule = pg.schedule.warmup_cosine { warmup = 0.2, floor = 0.1 },
    optimizers = {
      { role = "embedding", pg.optim.adamw { lr = 4e-3 } },
      { role = "backbone", pg.optim.muon { lr = 8e-3 } },
      { role = "head", pg.optim.rownorm { lr = 3e-3 } },
    },
  }
  return changes and base:with(changes) or base
end

-- ---- the program -----------------------------------------------------------------------------

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end
support.quote = quote

-- Run a shell command; returns the exit code, standard output, standard error.
function support.shell(command)
  local folder = support.folder()
  local _, how, code = os.execute(("{ %s\n} >%s/out 2>%s/err"):format(command, folder, folder))
  if how == "signal" then code = 128 + code end
  return code, support.read(folder .. "/out"), support.read(folder .. "/err")
end

-- perigee with these words, in folder `cwd`.
function support.perigee(words, cwd)
  local line = { quote(support.program) }
  for _, word in ipairs(words) do line[#line + 1] = quote(word) end
  local environment = "OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 "
  return support.shell(("cd %s && %s%s"):format(quote(cwd or support.root), environment,
    table.concat(line, " ")))
end

-- perigee with these words in a terminal, typed to as `script` says (tests/host/pty.c); returns the
-- exit code, what the terminal showed without its control sequences, and what went wrong.
function support.terminal(script, words, cwd)
  local folder = support.folder()
  support.write(folder .. "/script", table.concat(script, "\n") .. "\n")
  local line = { quote(support.build .. "/tests/host_pty"), quote(folder .. "/script"),
    quote(support.program) }
  for _, word in ipairs(words) do line[#line + 1] = quote(word) end
  local code, out, err = support.shell(("cd %s && HOME=%s XDG_STATE_HOME= OMP_NUM_THREADS=1 %s")
    :format(quote(cwd or support.root), quote(folder), table.concat(line, " ")))
  return code, (out:gsub("\27%[[%d;?]*%a", ""):gsub("\r", "")), err, folder
end

-- A data folder with a tokenizer of 300 tokens, made from this repository's README.
function support.text_data(folder)
  folder = folder or (support.folder() .. "/text")
  local code, _, err = support.perigee { "data", "prepare", "--text", support.root .. "/README.md",
    "--out", folder, "--vocab-size", "300", "--val-fraction", "0.3" }
  assert(code == 0, err)
  return folder
end

-- The program of a build with -DPG_EMULATE_CUDA=ON: PERIGEE_EMU, or emu/ in the build folder; nil.
function support.emulated()
  for _, path in ipairs { os.getenv "PERIGEE_EMU" or "", support.build .. "/emu/perigee" } do
    if core.fs.kind(path) == "file" then return path end
  end
end

-- busted's `it` for tests on the emulated device: names get the tags #cuda and #emulated.
function support.emulated_it(it, pending)
  return function(name, f)
    name = name .. " #cuda #emulated"
    if support.emulated() then return it(name, f) end
    pending(name .. ": there is no emulated build (ninja emu)")
  end
end

-- One line on standard error that contains every one of `parts`; returns whether, and the text.
function support.one_line(text, ...)
  local lines = select(2, text:gsub("\n", ""))
  for _, part in ipairs { ... } do
    if not text:find(part, 1, true) then return false, text end
  end
  return lines == 1, text
end

-- ---- memory ----------------------------------------------------------------------------------

function support.collect()
  for _ = 1, 3 do collectgarbage() end
end

return support
