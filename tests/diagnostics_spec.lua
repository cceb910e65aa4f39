-- Every diagnostic of a training run, on several ranks and on the emulated device, against the CPU
-- alone. Tests are tagged #mpi and #cuda.
local support = require "lua_support"
local core = support.core

local environment = "OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 "
  .. "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "

local function train(program, settings, prefix, ...)
  local out = support.folder() .. "/run"
  local words = { environment .. (prefix or ""), support.quote(program), "train",
    "tests/diagnostics_recipe.lua", "--quiet", "--out", support.quote(out), ... }
  for name, value in pairs(settings) do
    words[#words + 1] = ("--set %s=%s"):format(name, tostring(value))
  end
  local code, _, err = support.shell(("cd %s && %s"):format(support.quote(support.root),
    table.concat(words, " ")))
  assert.equal(0, code, err)
  assert.equal("", err)
  local _, lines = support.metrics(out)
  return lines
end

local alone
local function one_rank()
  alone = alone or train(support.program, {})
  return alone
end

-- Every number of a line as name -> value, elements of lists and tables too.
local function flat(line, prefix, into)
  for name, x in pairs(line) do
    name = prefix .. tostring(name)
    if type(x) == "table" then
      flat(x, name .. ".", into)
    else
      into[name] = x
    end
  end
  return into
end

-- How far a number may be from x. `bar`: the relative error of a gradient (SPEC §7), of which, and
-- of weights after updates with it, these are functions. At most a product of two such: twice that.
-- Squares of norms that are subtracted, of batches of 8 and of 2 sequences, lose another
-- (8 + 2)/(8 - 2) < 2.
local function allowed(name, x, line, bar)
  if name:match("^noise/[gts]") then return 4 * bar * math.abs(x) end
  -- Differences of losses or entropies, both below log(97) < 5: each has the error of a loss.
  if name:match("_change$") or name == "first_order/actual" then return 2 * bar * 5 end
  if name:match("gradient_cosine$") then return 2 * bar end -- means of numbers up to 1, of any sign
  if name == "first_order/actual_to_predicted" then
    return 2 * bar * 5 / math.abs(line["first_order/predicted"]) + 2 * bar * math.abs(x)
  end
  return 2 * bar * math.abs(x)
end

local measured = { "^diagnostics/", "^first_order/", "^functional/step/", "^functional/start/",
  "^geometry/", "^logits/", "^noise/", "^validation/", "^weights/" }

-- Lines of two trainings; returns how many numbers of every diagnostic were compared.
local function same(want, got, bar)
  local count = {}
  for update, line in pairs(want) do
    local a, b = flat(line, "", {}), flat(got[update], "", {})
    for name, x in pairs(a) do
      local y, text = b[name], ("update %d, %s: %s and %s"):format(update, name, tostring(x),
        tostring(b[name]))
      local group
      for _, pattern in ipairs(measured) do group = group or name:match(pattern) and pattern end
      if not group or name:match("seconds") then -- luacheck: ignore 542
        -- Of the run, or a time.
      elseif name:match("^geometry/oracle") then
        -- The ends of certified intervals of one number: they overlap.
        local other = name:match("%.1$") and name:gsub("1$", "2") or name:gsub("2$", "1")
        local below = name:match("%.1$") and x - b[other] or b[other] - x
        assert.is_true(below <= 2 * bar * math.abs(x), text)
        count[group] = (count[group] or 0) + 1
      elseif name == "first_order/common" then
        -- 0 but for rounding: a sum of 97 rows, each of them a sum of the batch's 128 positions.
        assert.is_true(x <= 225 * 2 ^ -24 and y <= 225 * 2 ^ -24, text)
      elseif math.type(x) == "float" then
        assert.is_true(math.abs(x - y) <= allowed(name, x, line, bar), text)
        count[group] = (count[group] or 0) + 1
      else
        assert.equal(x, y, text)
      end
    end
    for name in pairs(b) do assert.is_not_nil(a[name], name) end
  end
  return count
end

local function compared(want, got, bar)
  local count = same(want, got, bar)
  for _, pattern in ipairs(measured) do
    assert.is_true((count[pattern] or 0) >= 4, pattern .. " was not measured")
  end
end

teardown(support.clean)

describe("all diagnostics", function()
  for _, case in ipairs { { 2, true }, { 4, false } } do
    local ranks, shard = case[1], case[2]
    it(("are on %d ranks those of one, shard=%s #mpi"):format(ranks, tostring(shard)), function()
      if support.shell("command -v mpirun") ~= 0
        or core.fs.kind(support.build .. "/lib/perigee/perigee_mpi.so") ~= "file" then
        return pending "there is no mpirun, or this build has no perigee_mpi.so"
      end
      local got = train(support.program, { shard = shard },
        ("timeout 100 mpirun --bind-to none --oversubscribe -n %d"):format(ranks))
      compared(one_rank(), got, 5e-6)
    end)
  end

  support.emulated_it(it, pending)("are on the device those of the CPU", function()
    compared(one_rank(), train(support.emulated(), {}, "", "--device cuda --compute fp32"), 5e-6)
  end)
end)
