-- pg.head: a head with hidden states and targets from elsewhere: loss, gradient, updates of the
-- head alone, the laboratory on it, files, refusals.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local ctx
setup(function() ctx = assert(core.context { threads = 1 }) end)
teardown(function()
  ctx:close()
  support.clean()
end)

-- Numbers like normals, the same every time.
local function numbers(rows, columns, seed, scale)
  local t = pg.zeros(rows, columns, ctx)
  return t:normal_(0, scale, pg.generator(seed))
end

local function small(n, compute)
  local targets = {}
  for i = 1, n do targets[i] = (i * 37 + 5) % 97 end
  local parts = { U = numbers(97, 18, 1, 0.3), hidden = numbers(n, 18, 2, 1), targets = targets,
    compute = compute, context = ctx }
  return assert(pg.head(parts)), parts
end

-- A matrix with its elements rounded to bf16, to even.
local function rounded(t)
  local rows = t:to_table()
  for _, row in ipairs(rows) do
    for j, x in ipairs(row) do
      local bits = string.unpack("<I4", string.pack("<f", x))
      bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
      row[j] = string.unpack("<f", string.pack("<I4", bits))
    end
  end
  return pg.tensor(rows, ctx)
end

-- Mean cross entropy and its gradient in Lua's doubles, and the mean of |r_i| |h_i| over the
-- positions, r_i the residual p - e_target.
local function by_hand(u, h, targets, scale)
  u, h = u:to_table(), h:to_table()
  local loss, g, lengths = 0.0, {}, 0.0
  for v = 1, #u do
    g[v] = {}
    for j = 1, #u[1] do g[v][j] = 0.0 end
  end
  for i, row in ipairs(h) do
    local z, top, sum = {}, -math.huge, 0.0
    for v = 1, #u do
      z[v] = 0.0
      for j = 1, #row do z[v] = z[v] + scale * u[v][j] * row[j] end
      top = math.max(top, z[v])
    end
    for v = 1, #u do sum = sum + math.exp(z[v] - top) end
    loss = loss + top + math.log(sum) - z[targets[i] + 1]
    local residual, length = 0.0, 0.0
    for j = 1, #row do length = length + row[j] ^ 2 end
    for v = 1, #u do
      local r = math.exp(z[v] - top) / sum - (v == targets[i] + 1 and 1 or 0)
      residual = residual + r ^ 2
      for j = 1, #row do g[v][j] = g[v][j] + scale * r * row[j] / #h end
    end
    lengths = lengths + math.sqrt(residual * length)
  end
  return loss / #h, g, lengths / #h
end

-- fp32 sums of 18 products and of 97 exponentials, logits up to 5: 2 (5 (18 + 2) + 18 + 16) u
local bar = 2 * (5 * 20 + 34) * 2 ^ -24

describe("a head without its model", function()
  for _, n in ipairs { 1, 37 } do
    it(("has the loss and the gradient of its softmax at %d positions"):format(n), function()
      local head <close>, parts = small(n)
      local loss, g = by_hand(parts.U, parts.hidden, parts.targets, 1)
      assert(math.abs(head:loss() - loss) <= bar * loss)
      local want = pg.tensor(g, ctx)
      assert((head.gradient - want):norm() <= bar * want:norm())
      assert.equal(n, head.positions)
      assert.equal(97, head.rows)
      assert.equal(18, head.columns)
      assert.equal(0, head.update)
      assert.is_nil(head.increment)
    end)
  end

  it("is updated alone by any optimizer", function()
    local mine = pg.optim.define { name = "mine", slots = {}, defaults = { lr = 1 },
      increment = function(w, h) return w.gradient:mul(-h.lr) end }
    for name, optimizer in pairs { sgd = pg.optim.sgd { lr = 0.5 }, mine = mine { lr = 0.5 } } do
      local head <close>, parts = small(37)
      local before, g = head.value:clone(), head.gradient:clone()
      local step = head:step(optimizer)
      assert(head.increment:allclose(g:mul(-0.5), 1e-6, 0), name)
      assert(head.value:allclose(before + head.increment, 1e-6, 1e-8), name)
      assert(head:loss() < step.loss)
      -- what was given is not what is trained
      assert(parts.U:allclose(before, 0, 0))
    end
    local others = { "adamw", "rownorm", "muon", "lion", "scion", "kfac", "soap", "exact" }
    local known = {}
    for _, d in ipairs(core.optimizers()) do known[d.name] = true end
    for _, name in ipairs(others) do
      if known[name] then
        local head <close> = small(37)
        local first = head:loss()
        local step = head:step(pg.optim[name] { lr = 1e-3 }, 3)
        assert(step.loss < first, name)
        assert.equal(3, head.update)
        assert(head.increment:norm() > 0)
      end
    end
  end)

  it("has the geometry that a run's panel has", function()
    local head <close> = small(37)
    local step = head:step(pg.optim.rownorm { lr = 1e-2 })
    local after = head:loss()
    local value = head.value:clone()
    local d = pg.geometry.diameter(head.increment)
    assert(d.value <= 2e-2 * (1 + 1e-6) and d.value > 1e-2)
    local h = assert(head:hilbert(nil, { backward = true, positions = true }))
    assert.same(h.rms, pg.geometry.hilbert(head.increment, head).rms)
    assert(h.rms > 0 and h.loss_used <= 1 and h.backward_used <= 1 and h.tokens == 37)
    assert.near(h.rms / (d.value * math.sqrt(18)), h.utilisation, 1e-9)
    -- the mean of its changes of loss is the change of the loss
    local sum = 0.0
    for _, x in ipairs(h.positions.loss_change) do sum = sum + x end
    assert.near(after - step.loss, sum / 37, 4 * bar * step.loss)
    local b = assert(head:bottleneck { positions = true })
    assert.near(math.sqrt(18 / 97), b.baseline, 1e-12)
    assert(b.rms > 0 and b.rms <= 1)
    sum = 0.0
    for _, x in ipairs(b.positions.loss) do sum = sum + x end
    assert.near(after, sum / 37, bar * after)
    assert.equal(8, #head:neighbours(3))
    assert(head:diameter().value > 0 and head:row_norms().count == 97)
    if head.separation then assert(head:separation().value > 0) end
    -- pure
    assert.same(value:to_table(), head.value:to_table())
    assert.matches("head %[97, 18%] with 37 hidden states, 1 updates", tostring(head))
  end)

  it("has the statistics of its logits, and their rank", function()
    local head <close> = small(37)
    local z = head.hidden:matmul(head.value:t()):to_table()
    local square, largest, entropy = 0.0, 0.0, 0.0
    for _, row in ipairs(z) do
      local sum, moment = 0.0, 0.0
      for _, x in ipairs(row) do
        square, largest = square + x * x, math.max(largest, math.abs(x))
        sum, moment = sum + math.exp(x), moment + x * math.exp(x)
      end
      entropy = entropy + math.log(sum) - moment / sum
    end
    -- The same fp32 products here; the sums of both are fp64.
    local got = assert(head:logits())
    assert.near(math.sqrt(square / (37 * 97)), got.rms, bar * got.rms)
    assert.near(largest, got.max_abs, bar * largest)
    assert.near(entropy / 37, got.prob_entropy_mean, bar * entropy / 37)
    assert.same({ got.rms, "of a head", 37 }, { got.value, got.panel, got.tokens })
    assert.equal(got.rms, pg.geometry.logits(head).rms)
    assert.matches("logits over 37 positions", tostring(got))
    -- Of 37 random directions in 18 dimensions, and of the sums of exponentials.
    local r = assert(head:log_rank())
    assert.same({ 19, 19, 19, 37 }, { r.rank, r.bound, #r.values, r.tokens })
    local few <close> = small(5)
    assert.equal(5, few:log_rank().rank)
    assert.error_matches(function() pg.geometry.attention(head) end,
      "a head alone has no attention: give the panel of a model")
  end)

  it("tells what updates would gain to first order", function()
    local head <close> = small(37)
    local g, loss = head.gradient:clone(), head:loss()
    local f = head:first_order(g:mul(-1e-3))
    assert.near(1e-3 * g:norm() ^ 2, f.gain, 1e-5 * f.gain)
    assert.near(1, f.cosine_gradient, 1e-5)
    assert(f.common < 1e-5)
    assert(f.ratio > 0 and f.ratio < math.sqrt(2 * 18 / 19))
    head:step(pg.optim.sgd { lr = 1e-3 })
    -- second order: half the largest curvature, |h|^2 / 2, times the square of the step
    local second = 0.25 * 60 * head.increment:norm() ^ 2
    assert.near(loss - f.gain, head:loss(), second + bar * loss)
    local before = head.value:to_table()
    local list = head:what_if { pg.optim.rownorm { lr = 1e-2 }, pg.optim.adamw { lr = 1e-3 } }
    assert.same(before, head.value:to_table())
    assert(#list == 2 and list[1].gain > 0 and list[2].hilbert > 0 and list[1].diameter <= 0.0201)
    assert.matches("rownorm", tostring(list))
  end)

  it("computes in bf16 as training does", function()
    local narrow <close>, parts = small(37, "bf16")
    -- What is rounded are the operands: U and h before the logits, and for the gradient each
    -- residual, by at most 2^-9 of itself, so that row i adds at most 2^-9 |r_i| |h_i| / n.
    local u, h = rounded(parts.U), rounded(parts.hidden)
    local loss, g, lengths = by_hand(u, h, parts.targets, 1)
    assert(math.abs(narrow:loss() - loss) <= bar * loss)
    local want = pg.tensor(g, ctx)
    assert((narrow.gradient - want):norm() <= 2 ^ -9 * lengths + bar * want:norm())
  end)

  it("reads files, and the prompt does", function()
    local head <close>, parts = small(5)
    local folder = support.folder()
    local files = { U = folder .. "/U.npy", hidden = folder .. "/hidden.npy",
      targets = folder .. "/targets.npy" }
    assert(parts.U:save(files.U))
    assert(parts.hidden:save(files.hidden))
    assert(pg.tensor(parts.targets, ctx):save(files.targets))
    local read <close> = assert(pg.head { U = files.U, hidden = files.hidden,
      targets = files.targets, context = ctx })
    assert.equal(head:loss(), read:loss())
    local code, text, err = support.perigee { "repl", "--head", files.U, "--head", files.hidden,
      "--head", files.targets, "-e", "print(head:loss())", "-e",
      "head:step(pg.optim.rownorm { lr = 1e-3 }, 2)", "-e", "print(head, head:hilbert().tokens)" }
    assert.equal(0, code, err)
    assert.near(head:loss(), tonumber(text:match "^%S+"), 1e-12)
    assert.matches("head %[97, 18%] with 5 hidden states, 2 updates%s5", text)
  end)

  it("takes what tools/export_head.py exports", function()
    local out = support.folder() .. "/head.safetensors"
    local script = support.root .. "/tests/export_head_check.py"
    local code, text, err = support.shell(("%s %s %s"):format(os.getenv "PG_PYTHON" or "python3",
      support.quote(script), support.quote(out)))
    if code == 77 then return pending(text) end
    assert.equal(0, code, err)
    local head <close> = assert(pg.head { file = out, context = ctx })
    assert(head.rows == 97 and head.columns == 18 and head.positions == 37)
    local loss = tonumber(text)
    assert(math.abs(head:loss() - loss) <= bar * loss)
  end)

  it("refuses what does not fit", function()
    local _, parts = small(5)
    for text, changes in pairs {
      ["hidden states have 17 columns, U has 18"] = { hidden = numbers(5, 17, 3, 1) },
      ["5 targets for 4 hidden states"] = { hidden = numbers(4, 18, 3, 1) },
      ["target 1 is 97; allowed: 0 to 96"] = { targets = { 1, 97, 2, 3, 4 } },
      ["expected a whole number"] = { targets = { 1, 1.5, 2, 3, 4 } },
      ["expected a matrix"] = { U = pg.zeros(18, ctx) },
      ["unknown key 'hiden'"] = { hiden = 1 },
      ["pg.head scale = 0"] = { scale = 0 },
    } do
      local all = {}
      for _, from in ipairs { parts, changes } do
        for key, value in pairs(from) do all[key] = value end
      end
      local ok, head, message = pcall(pg.head, all)
      local got = ok and tostring(message) or tostring(head)
      assert.is_nil(ok and head or nil, text)
      assert(got:find(text, 1, true), got)
    end
    local head <close> = small(5)
    assert.error_matches(function() print(head.valu) end, "no 'valu'")
    assert.error_matches(function() head:step(3) end, "pg.optim.NAME")
    assert.error_matches(function() head:hilbert() end, "no update was made")
    local bad = parts.hidden:clone()
    bad:set(2, 3, 0 / 0)
    local none, message, name = pg.head { U = parts.U, hidden = bad, targets = parts.targets,
      context = ctx }
    assert.same({ "ENONFINITE" }, { name })
    assert(none == nil and message:find("row 1, column 2", 1, true), message)
    head:close()
    assert.error_matches(function() print(head.value) end, "closed")
  end)
end)
