-- Shards, tokenizers and preparing a dataset from Lua.
local support = require "bind_support"
local core = support.core
local fs = core.fs

describe("shards", function()
  local ctx
  before_each(function() ctx = support.context() end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  it("are listed, scanned and counted", function()
    local list = assert(core.shards(ctx, support.golden, "*_train_*.bin"))
    assert.are.equal(3, #list)
    assert.are.equal("fineweb_train_000001.bin", list[1].name)
    local total, updates = 0, 0
    for i, shard in ipairs(list) do
      assert.are.equal(1024 + 2 * shard.tokens, shard.bytes)
      assert.are.equal(fs.size(support.golden .. "/" .. shard.name), shard.bytes)
      total = total + shard.tokens
      updates = updates + (shard.tokens - 1) // 16 // 8
      -- against the file itself
      local data = fs.read(support.golden .. "/" .. shard.name)
      local largest, at = -1, nil
      for k = 0, shard.tokens - 1 do
        local token = string.unpack("<I2", data, 1025 + 2 * k)
        if token > largest then largest, at = token, k end
      end
      assert.are.same({ largest, at }, { core.shard_scan(ctx, support.golden, "*_train_*.bin", i) })
    end
    assert.are.equal(total, list.tokens)
    assert.are.equal(updates, core.updates_per_epoch(ctx, support.golden, "*_train_*.bin", 16, 8))
    assert.matches("^%x+$", core.digest(ctx, support.golden))
    assert.are.equal(64, #core.digest(ctx, support.golden))
  end)

  it("have the identity of REFERENCE A2", function()
    local dir = support.folder()
    for name, tokens in pairs { fineweb_train_000001 = 21, fineweb_val_000000 = 9 } do
      local header = string.pack("<i4i4i4", 20240520, 1, tokens) .. ("\0"):rep(1024 - 12)
      fs.write(("%s/%s.bin"):format(dir, name), header .. ("\0\0"):rep(tokens))
    end
    assert.are.equal("d184795448e12cb3c4d4d589f96111db45348d1812fb9c9bb9ecf165568d6515",
      core.digest(ctx, dir))
  end)

  it("are refused when they are missing or damaged", function()
    local dir = support.folder()
    assert.are.equal("ENOENT", select(3, core.shards(ctx, dir, "*.bin")))
    fs.write(dir .. "/x_train_1.bin", ("\0"):rep(2000))
    local none, message, name = core.shards(ctx, dir, "*.bin")
    assert.is_nil(none)
    assert.are.equal("EFORMAT", name)
    assert.matches("x_train_1.bin", message)
    assert.error_matches(function() core.shard_scan(ctx, support.golden, "*_val_*.bin", 2) end,
      "shard 2 of 1")
    assert.error_matches(function() core.shards(ctx, dir) end, "pattern: a string expected")
  end)
end)

describe("preparing", function()
  local ctx, dir, text
  before_each(function()
    ctx = support.context()
    dir = support.folder()
    local lines = {}
    for i = 1, 400 do lines[i] = ("line %d: the quick brown fox, the lazy dog\n"):format(i) end
    text = table.concat(lines)
    fs.write(dir .. "/text.txt", text)
  end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  local function prepare(changes)
    local options = { texts = { dir .. "/text.txt" }, out = dir .. "/out", vocab = 300,
      val_fraction = 0.1 }
    for key, value in pairs(changes or {}) do options[key] = value end
    return core.prepare(ctx, options)
  end

  it("makes shards and a tokenizer that reads them", function()
    local seen, last = 0, nil
    local report = assert(prepare { progress = function(what, fraction)
      assert(type(what) == "string" and fraction >= 0 and fraction <= 1)
      seen, last = seen + 1, fraction
    end })
    assert.is_true(seen > 0)
    assert.is_number(last)
    assert.are.equal(300, report.vocab)
    assert.are.equal(core.digest(ctx, dir .. "/out"), report.digest)
    local train = core.shards(ctx, dir .. "/out", "*_train_*.bin")
    assert.are.same({ report.train_tokens, report.train_shards }, { train.tokens, #train })

    local tok = assert(core.tokenizer(ctx, dir .. "/out/tokenizer.json"))
    assert.are.equal(300, tok:vocab())
    local ids = tok:encode(text)
    assert.are.equal(text, tok:decode(ids))
    assert.is_true(#ids < #text / 2)
    local data = fs.read(dir .. "/out/" .. train[1].name)
    for i = 1, 100 do assert.are.equal(ids[i], (string.unpack("<I2", data, 1023 + 2 * i))) end
    local odd = "  tabs\t\xff\xfe \xf0\x9f\x98 don't DON'T <|endoftext|>\0 "
    assert.are.equal(odd, tok:decode(tok:encode(odd)))
    local eot = tok:end_of_text()
    assert.are.equal("<|endoftext|>", tok:bytes(eot))
    local special, plain = tok:encode("a<|endoftext|>b", true), tok:encode "a<|endoftext|>b"
    assert.are.equal(eot, special[2])
    for _, id in ipairs(plain) do assert.are_not.equal(eot, id) end
    local the = tok:encode " the"
    assert.are.equal(1, #the)
    assert.are.equal(the[1], tok:find " the")
    assert.is_nil(tok:find "no such token")
    assert.are.equal("", tok:decode {})
    assert.are.same({}, tok:encode "")
    assert.error_matches(function() tok:decode { 300 } end, "token 300 is not in the vocabulary of 300")
    assert.error_matches(function() tok:decode { -1 } end, "token %-1")
    assert.error_matches(function() tok:decode { "1" } end, 'must be an integer, got string "1"')
    assert.error_matches(function() tok:encode(3) end, "text: a string expected")
    assert.are.equal("EEXIST", select(3, prepare()))
  end)

  it("raises what its progress function raised and leaves nothing", function()
    local object = {}
    local ok, err = pcall(prepare, { progress = function() error(object) end })
    assert.is_false(ok)
    assert.are.equal(object, err)
    assert.is_false(ctx:cancelled())
    assert.is_nil((core.shards(ctx, dir .. "/out", "*.bin")))
    assert.is_table(prepare())
  end)

  it("checks its options", function()
    assert.error_matches(function() prepare { vocabulary = 3 } end, "unknown key 'vocabulary'")
    assert.error_matches(function() prepare { progress = 3 } end, "progress: a function")
    assert.error_matches(function() prepare { texts = {} } end, "at least one file")
    assert.error_matches(function() prepare { texts = { 1 } } end, "file names expected")
    assert.are.equal("ENOENT", select(3, prepare { texts = { dir .. "/none" } }))
    assert.are.equal("ENOENT", select(3, core.tokenizer(ctx, dir .. "/none")))
  end)
end)

describe("an evaluation that is refused", function()
  it("leaves nothing behind that outlives its context", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert(core.fs.make(folder))
    local parts = { string.pack("<i4i4i4", 20240520, 1, 600), ("\0"):rep(1024 - 12) }
    for i = 0, 599 do parts[#parts + 1] = string.pack("<I2", i % 31) end
    assert(core.fs.write(folder .. "/x_val_000000.bin", table.concat(parts)))
    do
      local ctx <close> = assert(core.context {})
      local model <close> = assert(core.model(ctx, { layers = 1, width = 8, heads = 1,
        head_dim = 8, context = 8, vocab = 31 }))
      local panel <close> = assert(core.panel(ctx, { data = folder, time = 16, vocab = 31,
        tokens = 32 }))
      local head = model:find("lm_head.weight").value
      local ok, message = pcall(core.hilbert, model, panel, head)
      assert.is_false(ok)
      assert.matches("sequences of 16 positions", message)
    end -- closing the context would abort the process if activations were still alive
    core.fs.remove(folder)
  end)
end)
