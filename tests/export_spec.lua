-- perigee export: a run's metrics as CSV, its head as a file of NumPy or safetensors.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

describe("perigee export", function()
  teardown(support.clean)

  it("writes the last line of each update as CSV", function()
    local out = support.folder()
    support.write(out .. "/metrics.jsonl", table.concat({
      '{"progress/update": 2, "train/loss": 9.5}', '{"session": 2}',
      '{"progress/update": 4, "train/loss": 0.1, "pair": [3, 5], "text": "a \\"b\\", c"}',
      '{"progress/update": 2, "train/loss": null, "nonfinite": ["train/loss"], "flag": true}',
      '{"progress/upd' }, "\n"))
    local want = "progress/update,train/loss,pair,text,flag\n2,,,,true\n"
      .. '4,0.1,"[3, 5]","a ""b"", c",\n'
    local code, stdout = support.perigee { "export", out }
    assert.equal(0, code)
    assert.equal(want, (stdout:gsub("%[3, ?5%]", "[3, 5]")))
    assert.equal(0, (support.perigee { "export", out, "--out", out .. "/a.csv" }))
    assert.equal(stdout, support.read(out .. "/a.csv"))
  end)

  it("says what is wrong with a line, a folder or a name", function()
    local out = support.folder()
    local function refused(code, part, ...)
      local got, _, stderr = support.perigee { "export", out, ... }
      assert.equal(code, got)
      assert.is_truthy(stderr:find(part, 1, true), stderr)
    end
    refused(1, "metrics.jsonl is missing: expected a run directory")
    support.write(out .. "/metrics.jsonl", '{"progress/update": 2}\n{"a": \n')
    refused(1, "metrics.jsonl:2 is not a line of metrics")
    support.write(out .. "/metrics.jsonl", '7\n')
    refused(1, "metrics.jsonl:1 is not a line of metrics")
    refused(2, "expected --out FILE", "--format", "npy")
    refused(2, "expected a name that ends in .npy", "--format", "npy", "--out", "x.bin")
    refused(1, "holds no valid checkpoint", "--format", "npy", "--out", out .. "/x.npy")
    support.write(out .. "/metrics.jsonl", '{"progress/update": 2}\n')
    assert.equal(0, (support.shell("mkfifo " .. out .. "/pipe.npy")))
    refused(1, "a device, pipe or socket, expected a new name or a regular file", "--out",
      out .. "/pipe.npy")
    assert.equal("other", core.fs.kind(out .. "/pipe.npy"))
    refused(1, "Is a directory", "--out", out)
    local ctx <close> = assert(core.context { device = "cpu" })
    local t <close> = pg.zeros(2, ctx)
    local saved, message = t:save(out .. "/pipe.npy")
    assert.is_nil(saved)
    assert.is_truthy(message:find("expected a new name or a file", 1, true), message)
    assert.equal("other", core.fs.kind(out .. "/pipe.npy"))
  end)

  it("writes the head", function()
    local out = support.folder() .. "/run"
    local run = assert(pg.open(support.recipe(pg, support.data(), { updates = 2 }),
      { out = out, threads = 1 }))
    for _ in run:updates() do end -- luacheck: ignore 542
    run:close()
    local ctx <close> = assert(core.context { device = "cpu" })
    local want <close> = assert(pg.load(out .. "/checkpoints/00000002/model.safetensors",
      "lm_head.weight", ctx))
    for format, name in pairs { npy = false, safetensors = "tensor" } do
      local file = ("%s/head.%s"):format(out, format)
      local code, _, stderr = support.perigee { "export", out, "--format", format, "--out", file }
      assert.equal(0, code, stderr)
      local got <close> = name and assert(pg.load(file, name, ctx)) or assert(pg.load(file, ctx))
      assert.same(want:to_table(), got:to_table())
    end
  end)
end)
