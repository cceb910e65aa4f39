-- The reference, lua/doc/*.md: its examples run as they stand, and it leaves nothing out that the
-- code knows. The names come from the modules (from their messages about unknown names, where those
-- list them).
local pg = require "perigee"
local support = require "lua_support"
local cli = require "perigee.cli"
local runs = require "perigee.run"

local pages = { support.read("lua/doc/README.md") } -- and the others in the order of its list
for page in pages[1]:gmatch("%]%(([%w_]+%.md)%)") do
  pages[#pages + 1] = support.read("lua/doc/" .. page)
end
local text = table.concat(pages, "\n")
local data

-- The text below the heading TITLE up to the next heading.
local function section(title)
  local lines, inside, fenced, found = {}, false, false, false
  for line in text:gmatch("[^\n]*") do
    if line:find("^```") then fenced = not fenced end
    local heading = not fenced and line:match("^##? (.*)$")
    if heading then
      inside = heading == title
      found = found or inside
    elseif inside then
      lines[#lines + 1] = line
    end
  end
  assert(found, "no section " .. title)
  return "\n" .. table.concat(lines, "\n")
end

-- Inline code and blocks, in one string each.
local function code_of(part)
  local code = {}
  part = part:gsub("\n```%a*\n(.-)\n```", function(block)
    code[#code + 1] = block
    return "\n"
  end)
  for span in part:gmatch("`([^`\n]+)`") do code[#code + 1] = span end
  return "\n" .. table.concat(code, "\n") .. "\n"
end

-- Assert that every name occurs as a whole word in the code of a section.
local function documented(title, names, pattern)
  local code = code_of(title and section(title) or text)
  assert(#names > 0, "no names")
  for _, name in ipairs(names) do
    local escaped = (pattern or "%s"):format((name:gsub("%W", "%%%0")))
    assert(code:find("%f[%w_]" .. escaped .. "%f[^%w_]"),
      ("'%s' is not documented in section %s"):format(name, title or "of any name"))
  end
end

-- The list that a message ends with: "… (known: a, b)" or "… the fields are a, b".
local function listed(f, ...)
  local ok, e = pcall(f, ...)
  assert(not ok, "nothing was refused")
  local list = tostring(e):match("%(known: (.-)%)$") or tostring(e):match("the fields are (.-)$")
  assert(list, tostring(e))
  local names = {}
  for name in list:gmatch("[^, ]+") do names[#names + 1] = name end
  return names
end

-- Names that a table with a missing-name message knows.
local function members(object)
  return listed(function() return object.no_such_name end)
end

local unknown = { no_such_name = 1 }

local function recipe_keys(key)
  local changes = key == nil and unknown or { [key] = unknown }
  return listed(function()
    local base = support.recipe(pg, "x")
    if key == "model" then changes = { model = { no_such_name = 1 } } end
    return base:with(changes)
  end)
end

describe("the reference documents", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  it("formula, unit and source of every name of the geometry laboratory", function()
    local help = require "perigee.repl.help"
    local function explained(name)
      local shown = help.text(name) or ""
      for _, label in ipairs { "formula", "unit", "source" } do
        assert(shown:find("\n  " .. label .. ": %S"),
          ("help '%s' has no %s: %s"):format(name, label, shown))
      end
    end
    for module, list in pairs { geometry = require("perigee.geometry").raw,
      diagnostics = require("perigee.diagnostics").public } do
      for name in pairs(list) do
        explained(("pg.%s.%s"):format(module, name))
        explained(name)
      end
    end
    -- Tables of names are those of results; the others are of options.
    local header, names
    for line in (support.read("lua/doc/geometry.md") .. "\n"):gmatch("([^\n]*)\n") do
      if not line:find("^|") then
        header = nil
      elseif not header then
        header = line
        names = line:find("^| name ") or line:find("^| field ")
        assert(not names or line:find("| formula | unit | source |", 1, true), line)
      elseif names and not line:find("^|%-") then
        for name in line:match("^| (.-) | "):gmatch("`([%w_%.]+)`") do explained(name) end
      end
    end
  end)

  it("every key of a recipe", function()
    documented("A recipe", recipe_keys())
    for _, key in ipairs { "model", "batch", "log", "seed" } do
      documented("A recipe", recipe_keys(key))
    end
    documented("A recipe", listed(pg.data.shards, unknown))
    documented("A recipe", listed(function()
      return support.recipe(pg, "x", { optimizers = { { no_such_name = 1, pg.optim.muon() } } })
    end))
    documented("A recipe", listed(function()
      return support.recipe(pg, "x", { model = { init_std = unknown } })
    end))
    documented("A recipe", listed(function()
      return support.recipe(pg, "x", { model = { head = unknown } })
    end))
    documented("Resume and fork", recipe_keys("fork"))
    -- Those of the table, each with a row of its own.
    local part = section("A recipe")
    for _, key in ipairs(recipe_keys()) do
      assert(part:find("\n| `" .. key .. "` |", 1, true), "no row for " .. key)
    end
  end)

  it("every name of the module", function()
    documented(nil, members(pg), "pg%%.%s")
    documented("Schedules", members(pg.schedule))
    documented("Hooks", members(pg.diagnostics), "pg%%.diagnostics%%.%s")
    documented(nil, members(pg.geometry), "pg%%.geometry%%.%s")
    documented("Geometry", listed(pg.geometry.row_norms, nil, unknown))
    documented("Panels", listed(pg.panel, unknown))
    documented("The gradient bottleneck", listed(pg.geometry.bottleneck, nil, unknown))
    documented("Hooks", listed(pg.diagnostics.bottleneck, unknown))
    documented("The functional size of a change", listed(pg.geometry.hilbert, nil, nil, unknown))
    documented("Geometry", listed(pg.geometry.radius, nil, unknown))
    documented("A head without its model", listed(pg.head, unknown))
    local ctx <close> = assert(pg.core.context { threads = 1 })
    local head <close> = assert(pg.head { U = { { 1 }, { 2 } }, hidden = { { 1 } }, targets = { 0 },
      context = ctx })
    documented("A head without its model", members(head))
    documented("A recipe", members(pg.data), "pg%%.data%%.%s")
    documented("Hooks", listed(pg.checkpoint, unknown))
    documented("Hooks", listed(pg.every, 1, print, unknown))
    documented("Hooks", listed(pg.diagnostics.validation, unknown))
    documented("Hooks", listed(pg.diagnostics.functional, unknown))
    documented("Hooks", listed(pg.diagnostics.first_order, unknown))
    documented("Hooks", listed(pg.diagnostics.head_diameter, unknown))
    documented("Hooks", listed(pg.diagnostics.head_geometry, unknown))
    documented("Hooks", { "uniform", "normal" })
    documented("Scripts", listed(pg.open, "x", unknown))
    documented("Scripts", listed(pg.resume, "x", unknown))
    documented("Optimizers", listed(pg.optim.define, unknown))
  end)

  it("every schedule with its options and their defaults", function()
    local part = section("Schedules")
    for _, name in ipairs(members(pg.schedule)) do
      local row = part:match("\n| `" .. name .. "` |[^\n]*")
      assert(row, "no row for " .. name)
      local made = pg.schedule[name](name == "cooldown" and { from = 1, length = 1 } or {})
      for option, value in pairs(made.options) do
        if not (name == "cooldown" and (option == "from" or option == "length")) then
          local shown = row:match("`" .. option .. " = ([^`]+)`")
          assert(shown and load("return " .. shown)() == value, name .. ": " .. option)
        else
          assert(row:find("`" .. option .. "`", 1, true), name .. ": " .. option)
        end
      end
    end
    documented("Schedules", { "scale", "values", "dump", "describe", "bind" }, "schedule:%s")
  end)

  it("every optimizer with its hyperparameters, defaults and slots", function()
    local part = section("Optimizers")
    for _, descriptor in ipairs(pg.core.optimizers()) do
      local row = part:match("\n| `" .. descriptor.name .. "` |[^\n]*")
      assert(row, "no row for " .. descriptor.name)
      for _, hyper in ipairs(descriptor.hypers) do
        local what = descriptor.name .. "." .. hyper.name
        if hyper.default == nil then
          assert(row:find("`" .. hyper.name .. "` (required)", 1, true), what)
        else
          local shown = row:match("`" .. hyper.name .. " = ([^`]+)`")
          assert(shown, what)
          assert.same(hyper.default, load("return " .. shown)(), what)
        end
        for _, choice in ipairs(hyper.choices or {}) do
          assert(part:find('"' .. choice .. '"', 1, true), what .. " = " .. choice)
        end
      end
      for _, slot in ipairs(descriptor.slots) do
        assert(row:match("[^|]*|$"):find("`" .. slot.name .. "`", 1, true), slot.name)
      end
    end
    documented("Optimizers", { "matrix", "row", "column", "rows_square", "columns_square",
      "scalar", "rows_factor", "columns_factor", "weight_decay_scale", "cautious", "clip", "lr",
      "independent", "help" })
  end)

  it("every field and method of a run, a parameter, w and h", function()
    local run <close> = assert(pg.open(support.recipe(pg, data, { updates = 2 }),
      { out = support.folder() .. "/run", threads = 1 }))
    local methods, fields = {}, {}
    for _, name in ipairs(members(run)) do
      table.insert(runs.methods[name] and methods or fields, name)
    end
    documented("The run", fields)
    documented("The run", methods, "run:%s")
    for _, name in ipairs(methods) do
      assert(section("The run"):find("\n| `run:" .. name .. "[ (]"), "no row for run:" .. name)
    end
    documented("The run", members(run.head))
    documented("The run", { "prepared", "running", "finished", "stopped", "failed" })
    local seen
    local spy = pg.optim.define { name = "spy", increment = function(w, h)
      seen = {}
      for name in pairs(w) do seen[#seen + 1] = name end
      return w.gradient:mul(-h.lr)
    end }
    run:set_optimizer("head", spy {})
    run:step()
    documented("Optimizers", seen)
  end)

  it("every tensor method", function()
    local ctx <close> = assert(pg.core.context { threads = 1 })
    local tensor = pg.core.zeros(ctx, 1)
    local _, table_of_methods = debug.getupvalue(getmetatable(tensor).__index, 1)
    local names = {}
    for name in pairs(table_of_methods) do names[#names + 1] = name end
    assert(#names > 60)
    documented("Tensors", names)
  end)

  it("every metric of a run with all diagnostics", function()
    local out = support.folder() .. "/run"
    local run = assert(pg.open(support.recipe(pg, data, { updates = 2, increments = "all", hooks = {
      pg.every(1, pg.diagnostics.head_diameter { bracket = true }),
      pg.every(1, pg.diagnostics.head_geometry { separation = true }),
      pg.every(1, pg.diagnostics.oracle { gap = 0.1 }),
      pg.every(1, pg.diagnostics.validation { tokens = 64, hilbert_panel = 64 }),
      pg.every(1, pg.diagnostics.bottleneck { panel = 64 }),
      pg.every(1, pg.diagnostics.functional { panel = 16, backward = true }),
      pg.every(1, pg.diagnostics.first_order { predict = true }),
      pg.every(1, pg.diagnostics.noise_scale()),
      pg.every(1, pg.diagnostics.weights { norms = true }),
      pg.every(1, pg.diagnostics.logits { panel = 16, attention = true, rank = true }),
      pg.checkpoint { every = 1 } } }), { out = out, threads = 1 }))
    for _ in run:updates() do end -- luacheck: ignore 542
    run:close()
    local code = code_of(section("What a run writes"))
    for _, line in ipairs((support.metrics(out))) do
      for name in pairs(line) do
        local short = "…/" .. name:match("[^/]*$")
        assert(code:find("\n" .. name .. "\n", 1, true) or code:find("\n" .. short .. "\n", 1, true)
          or name:find("^optimizer/peak_lr_"), name)
      end
    end
  end)

  it("every command of the program and the options of training", function()
    local part = section("The program")
    local _, overview = support.perigee { "--help" }
    local commands = 0
    for name in overview:gmatch("\n  (%a+) ") do
      commands = commands + 1
      assert(part:find("`" .. name .. "[ `]"), "command " .. name)
    end
    assert(commands >= 8)
    for _, option in ipairs(cli.training_options) do
      assert(part:find("`%-%-" .. option.name:gsub("%-", "%%-") .. "[ `]"), option.name)
    end
    for _, code in ipairs { 0, 1, 2, 75 } do
      assert(part:find("`" .. code .. "`", 1, true), "exit code " .. code)
    end
  end)
end)

describe("the reference's examples", function()
  local folder

  setup(function()
    folder = support.folder()
    for _, name in ipairs { "core", "kernels" } do
      assert(os.execute(("ln -s %s %s"):format(support.quote(support.root .. "/" .. name),
        support.quote(folder .. "/" .. name))))
    end
    assert(os.execute(("ln -s %s %s/build"):format(support.quote(support.build),
      support.quote(folder))))
    support.data(folder .. "/data/kjv")
  end)
  teardown(support.clean)

  it("run in their order", function()
    local counts = { lua = 0, sh = 0, c = 0 }
    for language, block in text:gmatch("\n```(%a+)\n(.-\n)```") do
      counts[language] = counts[language] + 1
      local code, _, err = 0, "", ""
      if language == "c" then
        support.write(folder .. "/host.c", block)
      elseif language == "sh" then
        code, _, err = support.shell(("cd %s && export OMP_NUM_THREADS=1 && set -e\n%s")
          :format(support.quote(folder), block))
      elseif block:find("\nreturn pg%.recipe") then
        local name = counts.lua == 1 and "recipe" or "recipe" .. counts.lua
        support.write(("%s/%s.lua"):format(folder, name), block)
        local out = "trained/" .. name
        code, _, err = support.perigee({ "train", name .. ".lua", "--max-updates", "2", "--quiet",
          "--out", out }, folder)
        assert.equal(0, code, block .. err)
        assert.equal(2, support.json(folder .. "/" .. out .. "/summary.json").update)
      else
        local name = ("script%d.lua"):format(counts.lua)
        -- On the block's first line, so that messages name its lines.
        support.write(folder .. "/" .. name, 'local pg = require "perigee"; ' .. block)
        code, _, err = support.perigee({ "run", name }, folder)
      end
      assert.equal(0, code, block .. err)
    end
    assert(counts.lua >= 8 and counts.sh == 3 and counts.c == 1)
  end)
end)
