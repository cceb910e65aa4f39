-- perigee repl: in a terminal, through a pipe, and for one line of code.
local support = require "lua_support"
local terminal = support.terminal
local core = support.core

local folder, out

-- perigee repl on the run with -e CODE…; returns the exit code, output, errors.
local function eval(...)
  local words = { "repl", out }
  for _, code in ipairs { ... } do
    words[#words + 1] = "-e"
    words[#words + 1] = code
  end
  return support.perigee(words)
end

-- The values of one chunk, through JSON.
local function values(code, paths)
  local words = { "repl", "--json", "-e", code, table.unpack(paths or { out }) }
  local status, text, err = support.perigee(words)
  assert(status == 0, text .. err)
  local line = assert(core.json.decode(text))
  assert.is_true(line.ok)
  return table.unpack(line.values, 1, #line.values)
end

setup(function()
  folder = support.folder()
  local data = support.text_data(folder .. "/text")
  out = folder .. "/run"
  local code, _, err = support.perigee { "train", "recipes/tiny.lua", "--set", "data=" .. data,
    "--set", "tokens=128", "--out", out, "--quiet" }
  assert(code == 0, err)
end)
teardown(support.clean)

describe("perigee repl in a terminal", function()
  it("shows values, continues chunks and keeps a private history", function()
    local code, shown, err, home = terminal({
      "< > ", "> 40 + 2", "< 42", "> for i = 1, 2 do", "< >>", "> print('i', i)", "> end",
      "< i\t2",
      "> {", "< >>", "> 1, x = 'y' }", '< { 1, x = "y" }', "> x = 1/3", "> x",
      "< 0.3333333333333333",
      "> 1, nil, 'a'", "< 1\tnil\ta", "^D" }, { "repl" })
    assert.equal(0, code, shown .. err)
    local path = home .. "/.local/state/perigee/history"
    assert.matches("40", support.read(path))
    local mode = select(2, support.shell("stat -c %a " .. path))
    assert.equal("600\n", mode)
  end)

  -- A word that is a token, and the part of it that no other token begins with.
  local function unique_token()
    local ctx <close> = assert(core.context { threads = 1 })
    local tokenizer <close> = assert(core.tokenizer(ctx, folder .. "/text/tokenizer.json"))
    local texts = {}
    for id = 0, tokenizer:vocab() - 1 do texts[id] = tokenizer:bytes(id) end
    for id = 0, #texts do
      local typed, others = texts[id]:sub(1, -2), 0
      for _, text in pairs(texts) do
        if text:sub(1, #typed) == typed and text ~= texts[id] then others = others + 1 end
      end
      if texts[id]:match("^[%a ]%a%a+$") and others == 0 then return typed, texts[id] end
    end
    error("no token of this text can be completed")
  end

  it("completes names, fields and tokens", function()
    local typed, whole = unique_token()
    local code, shown, err = terminal({
      "< > ", "+ head.val", "^I", ". 100", "> ", "< tensor F32 [300, 32]",
      "+ inc:row_no", "^I", ". 100", "> ():max() > 0", "< true",
      "+ pg.optim.rown", "^I", ". 100", "> ", "< function",
      "+ run:validat", "^I", "< validate  validation_tokens", "^C",
      "+ string.rep", "^I", ". 100", "> ('ab', 2)", "< abab",
      "+ runs[1].che", "^I", ". 100", "> ", "< checkpoints/00000020",
      "+ tok '" .. typed, "^I", ". 100", "> ", "< " .. whole .. '"  id', "^D" }, { "repl", out })
    assert.equal(0, code, shown .. err)
  end)

  it("completes a run and a model without making them", function()
    local view = require "perigee.repl.view"
    local workspace = require "perigee.repl.workspace"
    local ctx <close> = assert(core.context { threads = 1 })
    local prompt = workspace.new { ctx = ctx, out = function() end }
    local opened = prompt:add(view.open(ctx, out))
    local function shown(line) return select(2, prompt:complete(line)) end
    assert.equal("validate  validation_tokens", shown "run:validat")
    assert.equal("idat", (prompt:complete "a.run:val"))
    assert.matches("last_checkpoint", shown "a.run.")
    assert.matches("parameters", shown "runs[1].model:")
    assert.equal("ue", (prompt:complete "head.val"))
    assert.equal("dates", (prompt:complete "embedding.up"))
    assert.is_nil(opened._run)
    assert.is_nil(opened._model)
    -- What exists is looked at itself.
    local made = opened.model
    assert.equal("lue", (prompt:complete "head.va"))
    assert.equal(made, opened._model)
    made:close()
  end)

  it("comes back from a loop, from pcall around one, from a coroutine and from the core", function()
    local script = { "< > " }
    for _, text in ipairs {
      "while true do end", "while true do pcall(function() while true do end end) end",
      "coroutine.wrap(function() while true do end end)()",
      "repeat local ok = pcall(string.rep, 'x', 10) until false",
      "pg.core.sleep(1000)",
      -- A long call of the core, which polls the cancel flag of its context.
      "for i = 1, 1e9 do run:validate { tokens = 1000 } end" } do
      table.move({ "> " .. text, ". 400", "^C", "< interrupted" }, 1, 4, #script + 1, script)
    end
    for _, step in ipairs { "+ unfinished", "^C", "> 6 * 7", "< 42", "> error('bad')",
      "< stdin:1: bad",
      "> local f = function() error('deep') end local g = function() f() return 1 end g()",
      "< in upvalue 'f'", "> error()", "< nil was raised", "> 1", "< 1", "^D" } do
      script[#script + 1] = step
    end
    local code, shown, err = terminal(script, { "repl", out })
    assert.equal(0, code, shown .. err)
  end)

  it("cuts off the work of every context there is, and of none afterwards", function()
    local contexts = {}
    for i = 1, 70 do contexts[i] = assert(core.context { threads = 1 }) end
    local matrix = core.tensor(contexts[70], { { 1, 2 }, { 3, 5 } })
    local ok, message
    core.guard({ seconds = 0.02 }, function()
      -- Few enough instructions that the count hook does not end it before the core is asked.
      local started = core.clock()
      repeat local _ = ("x"):rep(1 << 24) until core.clock() - started > 0.3
      ok, message = core.diameter(matrix)
    end)
    assert.is_nil(ok)
    assert.matches("cancelled", message)
    assert.is_number(assert(core.diameter(matrix)).value)
    matrix:close()
    for _, ctx in ipairs(contexts) do ctx:close() end
  end)

  it("leaves at SIGTERM", function()
    local code, shown = terminal({ "< > ", "> 1", "< 1", "! SIGTERM" }, { "repl" })
    assert.equal(0, code, shown)
  end)
end)

describe("perigee repl without a terminal", function()
  local function pipe(text, options)
    local file = support.write(support.folder() .. "/input", text)
    return support.shell(("%s repl %s <%s"):format(support.program, options or "", file))
  end

  it("reads lines, goes on after errors and then fails", function()
    local code, shown, err = pipe "1 +\n1\nprint('a')\nerror('b')\nx = 3\nx\n"
    assert.equal(1, code)
    assert.equal("2\na\n3\n", shown)
    assert.equal("stdin:1: b\n", err)
    assert.equal(0, (pipe "x = 1\n"))
    code, shown, err = pipe "for i = 1, 2 do\n"
    assert.equal(1, code)
    assert.equal("", shown)
    assert.matches("incomplete", err)
  end)

  it("runs code and fails with 1", function()
    local code, shown, err = eval("x = 2", "x + 1", "print('p')")
    assert.equal(0, code, err)
    assert.equal("3\np\n", shown)
    code, shown, err = eval("error('no')", "print('never')")
    assert.equal(1, code)
    assert.equal("", shown)
    assert.equal("stdin:1: no\n", err)
    code = eval "for"
    assert.equal(1, code)
    assert.equal(2, (support.perigee { "repl", "--josn" }))
    code, shown, err = support.perigee { "repl", folder .. "/nothing" }
    assert.equal(1, code)
    assert.equal("", shown)
    assert.is_true(support.one_line(err, "ENOENT"))
  end)

  it("prints results as JSON lines", function()
    local code, shown, err = pipe("print('to stderr') return 1, 'é', {1, {a = 2}}, nil\nx = 1\n" ..
      "error('b')\n0/0\n", "--json")
    assert.equal(1, code)
    assert.equal("to stderr\n", err)
    local lines = {}
    for line in shown:gmatch("[^\n]+") do lines[#lines + 1] = assert(core.json.decode(line)) end
    assert.equal(3, #lines)
    assert.same({ 1, "é", { 1, { a = 2 } } }, { table.unpack(lines[1].values, 1, 3) })
    assert.equal(core.json.null, lines[1].values[4])
    assert.is_false(lines[2].ok)
    assert.equal("stdin:1: b", lines[2].error)
    assert.same({ "nan" }, lines[3].values)
  end)

  it("shows numbers so that they read back, and cuts large things", function()
    local shown
    for _, text in ipairs { "0.1", "1e300", "3.0", "-7", "1/3", "2^53", "math.maxinteger" } do
      shown = select(2, eval(text))
      local value = load("return " .. text)()
      assert.equal(value, load("return " .. shown)())
      assert.equal(math.type(value), math.type(load("return " .. shown)()))
    end
    shown = select(2, eval "local t = {} for i = 1, 1000 do t[i] = i end return t")
    assert.matches("960 more", shown)
    shown = select(2, eval "head.value")
    assert.matches("^tensor F32 %[300, 32%]\n", shown)
    assert.equal(8, select(2, shown:gsub("\n", "")))
    shown = select(2, eval "setmetatable({}, { __tostring = function() error('x') end })")
    assert.matches("cannot be shown", shown)
  end)
end)

describe("what is opened", function()
  it("has the model, the head, its increment and tokens", function()
    assert.equal(300, values "head.rows")
    assert.equal("lm_head.weight", values "parameters['lm_head.weight'].name")
    -- Rows count from 1, ids from 0; a token indexes rows by itself, both ways.
    local id, row, text, same, back = values(
      "local t = tok ' the' return t.id, t.row, t.text, tok(t.id) == t, tok.row(t.row).id")
    assert.equal(id + 1, row)
    assert.equal(" the", text)
    assert.is_true(same)
    assert.equal(id, back)
    assert.is_true(values(
      "local t = tok ' the' return (inc[t] - inc:row(t.id + 1)):norm() == 0 and " ..
      "inc:get(t, 2) == inc:get(t.id + 1, 2)"))
    -- A list of tokens and ids, a vector and a matrix of ids read alike.
    local listed, vector, matrix = values(
      "local t = tok ' the' return tok.text { t, 65, t.id }, " ..
      "tok.text(pg.tensor { t.id, 65, t.id }), tok.text(pg.tensor { { t.id }, { 65 }, { t.id } })")
    assert.matches("^ the.+ the$", listed)
    assert.equal(listed, vector)
    assert.equal(listed, matrix)
    assert.matches("tok.text%[2%] = 1.5", (select(3, eval "tok.text(pg.tensor { 1, 1.5 })")))
    assert.equal(1, (eval "tok.text { 300 }"))
    local code, _, err = eval "tok 'Perigee and more'"
    assert.equal(1, code)
    assert.matches("tokens: ", err)
    code = eval "tok(300)"
    assert.equal(1, code)
  end)

  it("finds neighbours and the pair of the diameter as brute force does", function()
    local found = values "head:neighbours(tok ' the', 5)"
    local ctx <close> = assert(core.context { threads = 1 })
    local w = assert(core.load_tensor(ctx, out .. "/checkpoints/00000020/model.safetensors",
      "lm_head.weight")):to_table()
    local at = values "(tok ' the').row"
    local list = {}
    for i, r in ipairs(w) do
      local sum, dot, ni, na = 0, 0, 0, 0
      for k, x in ipairs(r) do
        sum, dot = sum + (x - w[at][k]) ^ 2, dot + x * w[at][k]
        ni, na = ni + x * x, na + w[at][k] ^ 2
      end
      if i ~= at then
        list[#list + 1] = { row = i, distance = sum ^ 0.5, cosine = dot / (ni * na) ^ 0.5 }
      end
    end
    table.sort(list, function(a, b) return a.distance < b.distance end)
    assert.equal(5, #found)
    for i, entry in ipairs(found) do
      assert.equal(list[i].row, entry.row)
      assert.equal(entry.row - 1, entry.token.id)
      -- Differences and sums of 32 products in fp32 of numbers near 0.1: 1e-6 relative.
      assert.is_true(math.abs(entry.distance / list[i].distance - 1) < 1e-5)
      assert.is_true(math.abs(entry.cosine - list[i].cosine) < 1e-5)
    end
    local d = values "inc:diameter()"
    local _, lines = support.metrics(out)
    assert.equal(lines[20]["diagnostics/lm_head_step/diameter_exact"], d.value)
    assert.same(lines[20]["diagnostics/lm_head_step/diameter_tokens"],
      { d.rows[1] - 1, d.rows[2] - 1 })
    assert.same(lines[20]["diagnostics/lm_head_step/diameter_text"], d.text)
  end)

  it("measures the Hilbert step of the run on the same panel", function()
    local h = values "hilbert(128)"
    local _, lines = support.metrics(out)
    -- Two fp32 products of the same matrices, each within 5e-6 (SPEC §7).
    local logged = lines[20]["validation/hilbert_step/rms"]
    assert.is_true(math.abs(logged - h.rms) <= 1e-5 * logged)
    assert.equal(lines[20]["validation/hilbert_step/panel"], h.panel)
    assert.is_true(h.median <= h.p90 and h.p90 <= h.p99 and h.p99 <= h.max)
    assert.equal(h.max, h.worst[1].range)
    local worst = h.worst[1]
    assert.is_true(#worst.text > 0 and #worst.high_text > 0 and #worst.low_text > 0)
    local function text(id) return values(("tok(%d).text"):format(id)) end
    assert.same({ text(worst.high), text(worst.low) }, { worst.high_text, worst.low_text })
    local root = math.sqrt(values "model:config().width")
    assert.is_true(math.abs(h.utilisation * h.diameter * root - h.rms) < 1e-12 * h.rms)
    for _, name in ipairs { "kl", "tv", "aitchison", "fisher_rao", "entropy_change",
      "loss_change" } do
      assert.is_true(h[name].max > 0 and h[name].rms <= h[name].max, name)
    end
    assert.is_true(h.loss_used > 0 and h.loss_used <= 1 and h.backward == nil)
    local code, shown, err = eval("hilbert { tokens = 128, worst = 1, backward = true }")
    assert.equal(0, code, err)
    for _, part in ipairs { "utilisation RMS/", "fisher_rao", "of its bound H", "sends back",
      " against .*, after " } do
      assert.matches(part, shown)
    end
  end)

  it("leaves the run directory alone", function()
    local function state()
      local _, list = support.shell(("cd %s && find . -type f -exec sha256sum {} + | sort"):format(
        support.quote(out)))
      return list
    end
    local before = state()
    local code, _, err = eval("run", "run.update", "inc:diameter()", "hilbert(64)")
    assert.equal(0, code, err)
    assert.equal(before, state())
  end)

  it("takes several, by letters and positions", function()
    local older = out .. "/checkpoints/00000010"
    local x, y, z, n = values("a.update, b.update, runs[2].update, #runs", { out, older })
    assert.same({ 20, 10, 10, 2 }, { x, y, z, n })
    assert.is_true(values("(a.head.value - b.head.value):norm() > 0", { out, older }))
  end)
end)

describe("compare", function()
  it("gives the difference of the losses with an interval, distances and contexts", function()
    local older = out .. "/checkpoints/00000010"
    local c, from, to = values("compare(a, b, 128), a.run:validate { tokens = 128 }.loss, " ..
      "b.run:validate { tokens = 128 }.loss", { older, out })
    -- Eight sequences of 16 in other batches: fp32 losses near 5, summed in fp64.
    assert.is_true(math.abs(c.loss[1] - from) < 1e-5 and math.abs(c.loss[2] - to) < 1e-5)
    assert.equal(c.loss[2] - c.loss[1], c.difference)
    assert.is_true(c.interval[1] < c.difference and c.difference < c.interval[2])
    assert.is_true(c.interval[2] < 0) -- training helps
    assert.equal(8, c.sequences)
    assert.is_true(c.median <= c.p90 and c.p90 <= c.max and c.rms <= c.max)
    for _, entry in ipairs(c.worst) do
      assert.is_true(math.abs(entry.loss[2] - entry.loss[1]) <= entry.distance)
      assert.is_true(#entry.text > 0 and #entry.next > 0)
    end
    local same = values("compare(a, a, 64)", { out })
    assert.equal(0, same.difference)
    assert.equal(0, same.max)
    assert.same({ 0, 0 }, same.interval)
  end)

  it("resamples sequences as the formula says", function()
    local compare = require "perigee.repl.compare"
    -- All sequences alike: no spread. Two values: the mean of n draws is binomial; 95 % of it is
    -- within 1.96 standard errors of 0.5, here 0.098; a bootstrap of 2000 rounds misses that by a
    -- standard error of its quantiles, 0.098 * 0.05.
    assert.same({ 0.25, 0.25 }, compare.bootstrap({ 1, 1, 1 }, { 4, 4, 4 }, 0.95))
    local sums, lengths = {}, {}
    for i = 1, 100 do sums[i], lengths[i] = i % 2, 1 end
    local interval = compare.bootstrap(sums, lengths, 0.95)
    assert.is_true(math.abs(interval[1] - 0.402) < 0.02 and math.abs(interval[2] - 0.598) < 0.02)
    assert.is_nil(compare.bootstrap({ 1 }, { 4 }, 0.95))
  end)
end)

describe("training at the prompt", function()
  it("steps exactly as the run did, in memory", function()
    local older = out .. "/checkpoints/00000010"
    -- 10 more updates reach the weights of the checkpoint at 20, bit for bit.
    assert.is_true(values("(step(10).update == 20 and (a.head.value - b.head.value):norm() == 0 " ..
      "and a.inc:eq(b.inc):min() == 1)", { older, out }))
    local code, _, err = eval "step()"
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "finished at update 20"), err)
    local count = select(2, support.read(out .. "/metrics.jsonl"):gsub("\n", ""))
    assert.equal(0, (support.perigee { "repl", older, "-e", "step(10)", "-e", "run:edit('lm_head" ..
      ".weight', function(w) w:mul_(2) end)" }))
    assert.equal(count, select(2, support.read(out .. "/metrics.jsonl"):gsub("\n", "")))
    assert.equal(4, #core.fs.list(out .. "/checkpoints") + 1)
    -- A second checkpoint where it is asked for.
    local saved = folder .. "/saved"
    code, _, err = support.perigee { "repl", older, "-e", "step(2)", "-e",
      ("save %q"):format(saved) }
    assert.equal(0, code, err)
    assert.equal(12, values("a.update", { saved }))
  end)

  it("asks the oracle about the head's last gradient", function()
    local older = out .. "/checkpoints/00000010"
    local text, again, ok = values([[step(1) local o = oracle { gap = 1e-2, seconds = 60 }
      return tostring(o), oracle { matrix = head.gradient, gap = 0.05 }.gap <= 0.05,
        pg.geometry.check_oracle(head.gradient, o).ok]], { older })
    assert.matches("^T%(G%) in %[.*RowNorm keeps", text)
    assert.is_true(again and ok)
  end)

  it("answers what another optimizer would do and changes nothing", function()
    local older = out .. "/checkpoints/00000010"
    local code = [[
      local loader = run.epoch
      local lua = pg.optim.define { name = "plain", slots = { momentum = "matrix" },
        defaults = { lr = 1, beta = 0.5 }, increment = function(w, h)
          return w.slots.momentum:lerp_(w.gradient, 1 - h.beta):mul(-h.lr * w.updates)
        end }
      local w = what_if({ pg.optim.rownorm { lr = 3.2e-3 }, pg.optim.adamw { lr = 1e-3 },
        lua { lr = 0.1 } }, { warm = WARM, panel = 64 })
      local u = pg.random.uniform()
      step(1)
      local tried = w.optimizers
      return tried, tried[1].increment:eq(inc):min(), run.batch_hash, head.value:norm(), u,
        inc:norm()]]
    local w, first, hash, norm, draw, made = values(code:gsub("WARM", "0"), { older })
    assert.equal(1, first) -- "now" is what the next step made, bit for bit
    assert.equal(made, w[1].norm)
    assert.equal("rownorm", w[1].name:match("now: (.*)"))
    -- The same optimizer with the same settings begins with the same slots.
    assert.equal(w[1].norm, w[2].norm)
    assert.is_true(math.abs(w[2].cosine - 1) < 1e-6)
    assert.is_true(w[2].gain > 0 and w[3].gain > 0 and w[4].gain > 0)
    assert.is_true(w[1].diameter <= 2 * w[1].lr * (1 + 1e-6)) -- RowNorm's bound
    assert.is_true(w[3].hilbert > 0 and w[3].cosine < 1)
    local later, _, hash2, norm2, draw2, made2 = values(code:gsub("WARM", "3"), { older })
    assert.same({ hash, norm, draw, made }, { hash2, norm2, draw2, made2 })
    assert.not_equal(w[1].norm, later[1].norm)
    local plain = table.pack(values([[local u = pg.random.uniform() step(1)
      return run.batch_hash, head.value:norm(), u, inc:norm()]], { older }))
    plain.n = nil
    assert.same({ hash, norm, draw, made }, plain)
    for bad, part in pairs { ["what_if(3)"] = "an optimizer",
      ["what_if(pg.optim.frozen())"] = "makes no increments",
      ["what_if(pg.optim.adamw {}, { parameter = 'x' })"] = "no parameter is called" } do
      local _, _, err = eval(bad)
      assert.is_true(support.one_line(err, part), err)
    end
  end)

  it("can be interrupted and goes on", function()
    local code, shown, err = terminal({ "< > ", "> step(1)", "< now at 11",
      "> for i = 1, 1e9 do what_if(pg.optim.adamw {}, { warm = 20 }) end", ". 700", "^C",
      "< interrupted", "> step(1)", "< now at 12", "> run.update", "< 12", "^D" },
      { "repl", out .. "/checkpoints/00000010" })
    assert.equal(0, code, shown .. err)
  end)
end)

describe("help", function()
  it("knows recipe keys, methods, metrics, optimizers and values", function()
    for code, parts in pairs {
      ["help 'clip'"] = { "A recipe", "1.0" }, ["help 'run:validate'"] = { "loss, tokens" },
      ["help(run.validate)"] = { "loss, tokens" }, ["help 'train/loss'"] = { "last report" },
      ["help(pg.optim.muon)"] = { "momentum", "default 0.95" }, ["help 'adamw'"] = { "betas" },
      ["help(inc)"] = { "row_norms", "diameter" }, ["help(pg.every)"] = { "divides" },
      ["help 'wsd'"] = { "decay" }, ["help()"] = { "compare" },
    } do
      local status, shown, err = eval(code)
      assert.equal(0, status, code .. err)
      for _, part in ipairs(parts) do
        assert.is_truthy(shown:find(part, 1, true), ("%s: no '%s' in %s"):format(code, part, shown))
      end
    end
    local help = require "perigee.repl.help"
    for name, list in pairs { geometry = require("perigee.geometry").raw,
      diagnostics = require("perigee.diagnostics").public } do
      for member in pairs(list) do
        local full = ("pg.%s.%s"):format(name, member)
        assert.is_truthy((help.text(full) or ""):find(full, 1, true), full)
      end
    end
    local status, _, err = eval "help 'validaet'"
    assert.equal(1, status)
    assert.matches("did you mean 'validate'", err)
  end)
end)
