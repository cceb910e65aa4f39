-- TensorBoard's event files of a run: which values they hold, a file per session, none when not
-- wanted. Their format and checksums: tests/unit/events_test.c.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local data

local function train(run, stop)
  for update in run:updates() do
    if update == stop then run:stop("enough") end
  end
  run:close()
end

-- The data of each record of a file's text; a torn last record is left out.
local function records(text)
  local list, at = {}, 1
  while at + 11 <= #text do
    local size = string.unpack("<I8", text, at)
    if at + 15 + size > #text then break end
    list[#list + 1] = text:sub(at + 12, at + 11 + size)
    at = at + 16 + size
  end
  return list, at == #text + 1
end

local function varint(text, at)
  local value, shift = 0, 0
  while true do
    local byte = text:byte(at)
    value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    if byte < 128 then return value, at end
  end
end

-- A message's fields: number -> list of values, of bytes where they are not whole numbers.
local function fields(text)
  local found, at = {}, 1
  while at <= #text do
    local key, value
    key, at = varint(text, at)
    local kind = key & 7
    if kind == 0 then
      value, at = varint(text, at)
    else
      local size = kind == 1 and 8 or 4
      if kind == 2 then size, at = varint(text, at) end
      value, at = text:sub(at, at + size - 1), at + size
    end
    found[key >> 3] = found[key >> 3] or {}
    table.insert(found[key >> 3], value)
  end
  return found
end

-- Files of a run directory in the order of their names: lists of { step, tag -> value's fields }.
local function events(out)
  local names, files = {}, {}
  for _, name in ipairs(assert(core.fs.list(out))) do
    name = type(name) == "table" and name.name or name
    if name:find "^events%.out%.tfevents%.%d+%." then names[#names + 1] = name end
  end
  table.sort(names)
  for i, name in ipairs(names) do
    local list, whole = records(support.read(out .. "/" .. name))
    assert.is_true(whole, name)
    files[i] = {}
    for k, record in ipairs(list) do
      local event = fields(record)
      local entry = { step = event[2] and event[2][1] or 0, start = event[7] ~= nil }
      for _, value in ipairs(event[5] and fields(event[5][1])[1] or {}) do
        local parts = fields(value)
        entry[parts[1][1]] = parts
      end
      files[i][k] = entry
    end
  end
  return files
end

local function at(file, step)
  local found
  for _, entry in ipairs(file) do
    if entry.step == step and entry["train/loss"] then found = entry end
  end
  return found
end

describe("event files", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  it("hold the numbers of metrics.jsonl, row norms and the recipe, a file per session", function()
    local out = support.folder() .. "/run"
    train(assert(pg.open(support.recipe(pg, data), { out = out, threads = 1 })), 6)
    local first = events(out)
    assert.equal(1, #first)
    local resumed = assert(pg.resume(out, { threads = 1, recipe = support.recipe(pg, data) }))
    train(resumed)
    local files = events(out)
    assert.equal(2, #files)
    assert.same(first[1], files[1])
    assert.is_true(files[1][2].start and files[1][2].step == 0)
    assert.is_true(files[2][2].start)
    assert.equal(7, files[2][2].step)
    assert.is_truthy(files[1][3].recipe[8])
    local _, by_update = support.metrics(out)
    for _, place in ipairs { { 1, 4 }, { 2, 8 }, { 2, 12 } } do
      local entry, line = at(files[place[1]], place[2]), by_update[place[2]]
      local numbers = 0
      for name, value in pairs(line) do
        if type(value) == "number" then
          numbers = numbers + 1
          assert.equal(string.pack("<f", value), entry[name][2] and entry[name][2][1] or "\0\0\0\0",
            name)
        end
      end
      assert.is_true(numbers > 10)
      local histogram = fields(entry["head/row_norms"][5][1])
      assert.equal(97, (string.unpack("<d", histogram[3][1])))
    end
  end)

  it("take a step as a whole or not at all", function()
    local ctx <close> = assert(core.context { device = "cpu" })
    local out = support.folder()
    local file = assert(core.events(ctx, out, 0))
    local path = out .. "/" .. assert(core.fs.list(out))[1]
    local before = #records(support.read(path))
    for _, bad in ipairs { {}, { "b" }, { 1, 2 }, { "b", true }, { "b", { 1, "x" } } } do
      local function write() file:write(1, { { "first", 1 }, bad }) end
      assert.error_matches(write, "write: .*entry 2")
    end
    assert.equal(before, #records(support.read(path)))
    assert(file:write(2, { { "second", 2 }, { "list", { 0 / 0, 1 } } }))
    local text = support.read(path)
    assert.equal(before + 1, #records(text))
    assert.is_nil(text:find("first", 1, true))
    file:close()
  end)
  it("are left off by log.tensorboard = false", function()
    local out = support.folder() .. "/run"
    train(assert(pg.open(support.recipe(pg, data, { log = { tensorboard = false } }),
      { out = out, threads = 1 })))
    assert.same({}, events(out))
    local ok, e = pcall(support.recipe, pg, data, { log = { tensorboard = 1 } })
    assert.is_false(ok)
    assert.matches("log.tensorboard must be true or false, got 1", tostring(e), 1, true)
  end)
end)
