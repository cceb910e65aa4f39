-- Reports of run directories that the test writes, and of one that trained.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

teardown(support.clean)

-- A finished run directory; `change(files)` may damage it.
local function run(folder, name, o)
  local dir = folder .. "/" .. name
  assert(core.fs.make(dir))
  local function json(file, value) support.write(dir .. "/" .. file, core.json.encode(value)) end
  json("config.json", { name = o.recipe or "little", model = { width = o.width or 8 },
    data = { digest = "d" } })
  json("state.json", { recipe = "r", params = { head = o.head, seed = o.seed, lr = o.lr } })
  local lines = {}
  for u = 1, 6 do
    lines[u] = core.json.encode { ["progress/update"] = u, ["progress/tokens"] = 100 * u,
      ["performance/elapsed_seconds"] = 2.0 * u, ["validation/loss"] = o.loss + 0.5 * (6 - u),
      ["diagnostics/lm_head_step/diameter_exact"] = 0.01 * o.loss / u,
      ["validation/hilbert_step/rms"] = 0.02 * o.loss / u } .. "\n"
  end
  support.write(dir .. "/metrics.jsonl", table.concat(lines) .. (o.tail or ""))
  if o.status ~= "training" then
    json("summary.json", { exit_code = o.status and 1 or 0, status = o.status or "finished",
      reason = o.reason, update = 6, final_update = 6, final_tokens = 600, elapsed_seconds = 12.0,
      final_validation_loss = o.loss, final_diameter_exact = 0.01 * o.loss / 6,
      final_validation_hilbert_step_rms = 0.02 * o.loss / 6 })
  end
  return dir
end

local function six()
  local folder = support.folder()
  for seed = 0, 2 do
    run(folder, "a" .. seed, { head = "adamw", seed = seed, loss = 3 + 0.1 * seed })
    run(folder, "r" .. seed, { head = "rownorm", seed = seed, loss = 3.2 + 0.2 * seed })
  end
  return folder
end

local function has(text, part)
  assert(text:find(part, 1, true), ("no %q in:\n%s"):format(part, text))
end

describe("a report", function()
  it("has means, deviations and paired differences by seed", function()
    local text = assert(pg.report { six() }):markdown()
    has(text, "| head=adamw | 3 | 3.1000 ± 0.1000 |")
    has(text, "| head=rownorm | 3 | 3.4000 ± 0.2000 |")
    -- 0.2, 0.3, 0.4: half width 4.30265·0.1/√3 = 0.24841.
    has(text, "| rownorm − adamw | validation loss | 3 | 0.3000 ± 0.1000 | 0.0516 … 0.5484 |")
  end)

  it("shows no deviation of one seed, and pairs the seeds that both have", function()
    local folder = support.folder()
    run(folder, "a0", { head = "adamw", seed = 0, loss = 3 })
    run(folder, "a1", { head = "adamw", seed = 1, loss = 9 })
    run(folder, "r0", { head = "rownorm", seed = 0, loss = 4 })
    local text = assert(pg.report { folder }):markdown()
    has(text, "| head=rownorm | 1 | 4.0000 |")
    has(text, "| rownorm − adamw | validation loss | 1 | 1.0000 | – | – | 1.333 |")
  end)

  it("names what it leaves out, and does not average it", function()
    local folder = six()
    run(folder, "a3", { head = "adamw", seed = 3, loss = 99, status = "failed",
      reason = "loss is not finite" })
    run(folder, "a4", { head = "adamw", seed = 4, loss = 98, status = "training" })
    local nan = run(folder, "a5", { head = "adamw", seed = 5, loss = 97 })
    support.write(nan .. "/summary.json", '{"exit_code":0,"status":"finished","final_update":6,'
      .. '"final_validation_loss":null}')
    local torn = run(folder, "a6", { head = "adamw", seed = 6, loss = 96 })
    support.write(torn .. "/summary.json", '{"exit_code":0,')
    local text = assert(pg.report { folder }):markdown()
    has(text, "| head=adamw | 3 of 7 | 3.1000 ± 0.1000 |")
    has(text, "| a3 | failed | loss is not finite |")
    has(text, "| a4 | interrupted | it has not ended: killed, or still training |")
    has(text, "| a5 | not finite | validation loss is not a finite number |")
    has(text, "| a6 | damaged |")
  end)

  it("takes the last line of an update, and no torn one", function()
    local folder = support.folder()
    run(folder, "a", { head = "adamw", seed = 0, loss = 3, tail = core.json.encode {
      ["progress/update"] = 6, ["progress/tokens"] = 600, ["validation/loss"] = 2.75,
      ["performance/elapsed_seconds"] = 1.0 } .. '\n{"progress/update":7,"progress/tokens":700,' })
    local made = assert(pg.report { folder, out = folder .. "/out" })
    local csv = support.read(folder .. "/out/loss.csv")
    assert.equal("little", made.title)
    has(csv, ",600,2.75,,1\n")
    assert.is_nil(csv:find(",700,", 1, true))
  end)

  it("reads what a sweep lists, and only that", function()
    local folder = six()
    support.write(folder .. "/sweep.json", core.json.encode { runs = core.json.array {
      { name = "one", dir = "a0", params = { head = "adamw", seed = 0 }, status = "finished" },
      { name = "two", dir = "gone", params = { head = "adamw", seed = 1 }, status = "waiting" },
      { name = "out", dir = "../x" } } })
    local text = assert(pg.report { folder }):markdown()
    has(text, "| 1 of 2 | 3.0000 |")
    has(text, "| two | waiting |")
  end)

  it("refuses no runs, and mixed recipes and models", function()
    local folder = support.folder()
    local _, message = pg.report { folder }
    has(message, "there is no run in")
    _, message = pg.report { folder .. "/none" }
    has(message, "is not a folder")
    run(folder, "a", { head = "adamw", seed = 0, loss = 3 })
    run(folder, "b", { head = "adamw", seed = 1, loss = 3, width = 16 })
    _, message = pg.report { folder }
    has(message, "differ in their model (width=8; width=16)")
    local other = support.folder()
    run(other, "c", { recipe = "other", head = "adamw", seed = 0, loss = 3 })
    _, message = pg.report { folder .. "/a", other }
    has(message, "differ in their recipe (little, other)")
    assert(pg.report { folder .. "/a", other, mixed = true })
  end)

  it("flags the edge of a grid of rates", function()
    local folder = support.folder()
    for i, loss in ipairs { 3.0, 3.1, 3.3 } do
      run(folder, "x" .. i, { head = "adamw", seed = 0, lr = 10.0 ^ -i, loss = loss })
    end
    local text = assert(pg.report { folder }):markdown()
    has(text, "| 0.1 | 3.0000 | at the edge of the grid")
  end)

  it("writes figures, their data, and a page that loads nothing", function()
    local folder = six()
    local out = folder .. "/out"
    assert(pg.report { folder, out = out, target = 4 })
    for _, name in ipairs { "loss", "diameter", "hilbert" } do
      assert.equal("%PDF", support.read(("%s/%s.pdf"):format(out, name)):sub(1, 4))
      assert.equal("\137PNG", support.read(("%s/%s.png"):format(out, name)):sub(1, 4))
      has(support.read(("%s/%s.svg"):format(out, name)), "<svg")
    end
    local html = support.read(out .. "/report.html")
    has(html, '<html lang="en">')
    has(html, '<th scope="col">')
    has(html, 'role="img" aria-label="validation loss against tokens')
    assert.is_nil(html:find("src=", 1, true) or html:find("<script", 1, true))
    local ids = {}
    for id in html:gmatch ' id="([^"]*)"' do
      assert(not ids[id], "twice: " .. id)
      ids[id] = true
    end
  end)

  it("packs the same bytes of the same runs, which their sums confirm", function()
    local folder = six()
    local bytes = {}
    for i = 1, 2 do
      local file = ("%s/%d.tar.gz"):format(folder, i)
      assert(pg.report { folder .. "/a0", folder .. "/a1", out = folder .. "/out",
        bundle = file })
      bytes[i] = support.read(file)
      core.sleep(1.1) -- a PDF may hold the second of its making
    end
    local code, text = support.shell(("mkdir %s/x && tar -xzf %s/1.tar.gz -C %s/x && cd %s/x && "
      .. "sha256sum --quiet -c SHA256SUMS && find . -name summary.json | wc -l"):format(folder,
      folder, folder, folder))
    assert.equal(0, code)
    assert.equal("2", text:match "%d+")
    assert(bytes[1] == bytes[2])
    assert.error_matches(function() pg.report { folder, bundle = "x" } end, "expected with out")
  end)

  it("packs its own files only, and keeps the old archive when it cannot", function()
    local folder = six()
    local out, archive = folder .. "/out", folder .. "/out/b.tar.gz"
    for _ = 1, 2 do
      assert(core.fs.make(out))
      support.write(out .. "/mine.txt", "not the report's")
      assert(pg.report { folder, out = out, bundle = archive })
    end
    local _, listed = support.shell("tar tzf " .. support.quote(archive))
    has(listed, "report/report.md")
    assert.is_nil(listed:find("mine.txt", 1, true) or listed:find("b.tar.gz", 1, true))
    local before = support.read(archive)
    local tools = support.folder()
    assert.equal(0, (support.shell(("ln -s $(command -v sh) $(command -v gnuplot) %s"):format(
      tools))))
    local code, _, err = support.shell(("PATH=%s %s report %s --out %s --bundle %s"):format(tools,
      support.program, folder, out, archive))
    assert.equal(1, code)
    assert(support.one_line(err, "EIO: " .. archive, "not found"))
    assert.equal(before, support.read(archive))
  end)

  it("goes into folders of any name", function()
    local folder = six()
    for _, name in ipairs { "a\nb 'q\" \\ é", ("x"):rep(240) } do
      local out = folder .. "/" .. name
      assert(pg.report { folder, out = out })
      assert.equal("file", core.fs.kind(out .. "/loss.png"))
      has(support.read(out .. "/loss.svg"), "</svg>")
    end
  end)

  it("refuses a baseline that no run has", function()
    local code, _, err = support.perigee { "report", six(), "--baseline", "adam" }
    assert.equal(2, code)
    assert(support.one_line(err, 'baseline "adam" is not allowed', '"adamw" or "rownorm"'))
    assert(pg.report { six(), baseline = "rownorm" })
  end)

  it("shows no time where a summary has none that can be", function()
    local folder = six()
    for _, value in ipairs { "null", "1e300", "-1", '"x"', "[]" } do
      local path = folder .. "/a0/summary.json"
      support.write(path, (support.read(path):gsub('("elapsed_seconds": ?)[^,}]+', "%1" .. value)))
      has(assert(pg.report { folder }):markdown(), "| head=adamw | 3 | 3.1000 ± 0.1000 |")
    end
  end)

  it("is a page that a browser shows #browser", function()
    local found = io.popen "command -v chromium || true"
    local browser = found:read "l"
    found:close()
    if not browser then return pending "no chromium here" end
    local folder = six()
    local out = folder .. "/out"
    assert(pg.report { folder, out = out })
    local call = ("timeout 60 chromium --headless --no-sandbox --disable-gpu "
      .. "--user-data-dir=%s/home --window-size=390,844 %%s file://%s/report.html 2>/dev/null")
      :format(folder, out)
    local pipe = io.popen(call:format "--dump-dom")
    local dom = pipe:read "a"
    pipe:close()
    has(dom, "<caption>Final values")
    local _, figures = dom:gsub("<svg role=\"img\"", "")
    assert.equal(3, figures)
    os.execute(call:format("--screenshot=" .. folder .. "/page.png"))
    assert.equal("\137PNG", support.read(folder .. "/page.png"):sub(1, 4))
  end)

  it("reads a run that trained", function()
    local out = support.folder() .. "/run"
    local recipe = support.recipe(pg, support.data())
    do
      local trained <close> = assert(pg.open(recipe, { out = out, threads = 1 }))
      for _ in trained:updates() do end
    end
    local code, text = support.perigee { "report", out, "--markdown" }
    assert.equal(0, code)
    has(text, "| small | 1 |")
    assert.equal(2, (support.perigee { "report", out, "--html", "--csv" }))
  end)
end)
