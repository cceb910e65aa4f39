-- Tensors in files: .npy and safetensors, written and read back here and by NumPy.
local support = require "bind_support"
local pg = require "perigee"
local core = support.core

describe("tensors in files", function()
  local ctx, folder
  local generator = pg.generator(os.time())

  before_each(function()
    ctx = assert(core.context { device = os.getenv "PG_TEST_DEVICE" or "cpu", threads = 1 })
    folder = support.folder()
  end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  -- An .npy file: the dictionary as text, padded as NumPy does, and the elements' bytes.
  local function npy(name, dictionary, bytes, version)
    local path = ("%s/%s.npy"):format(folder, name)
    local format = version and version > 1 and "<I4" or "<I2"
    local start = 8 + string.packsize(format)
    local header = dictionary .. (" "):rep((-start - #dictionary - 1) % 64) .. "\n"
    assert(core.fs.write(path, ("\x93NUMPY%c\0"):format(version or 1)
      .. string.pack(format, #header) .. header .. bytes))
    return path
  end
  local function array(descr, shape, order)
    return ("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"):format(descr, order or "False",
      shape)
  end
  local function is(expected, t) assert.are.same(expected, t:to_table()) end

  it("come back as they were", function()
    for _, sizes in ipairs { {}, { 1 }, { 7 }, { 0 }, { 3, 5 }, { 0, 4 }, { 2, 3, 4 } } do
      local t = core.zeros(ctx, table.unpack(sizes))
      if #sizes <= 2 then t:normal_(0, 1, generator) end
      for _, kind in ipairs { "npy", "safetensors" } do
        local path = folder .. "/t." .. kind
        assert.is_true(t:save(path))
        local back = kind == "npy" and assert(pg.load(path, ctx))
          or assert(pg.load(path, "tensor", ctx))
        assert.are.same(sizes, back:shape())
        is(t:to_table(), back)
        assert.is_false(core.fs.exists(path .. ".partial"))
      end
    end
    local m = core.zeros(ctx, 5, 4):normal_(0, 1, generator)
    assert.is_true(m:t()[{ { 2, 3 } }]:save(folder .. "/view.npy"))
    is(m:t()[{ { 2, 3 } }]:to_table(), pg.load(folder .. "/view.npy", ctx))
  end)

  it("are known by name", function()
    local a, b = pg.ones(2, ctx), pg.eye(2, ctx)
    assert(core.save_tensors(ctx, folder .. "/x.safetensors", { { "a", a }, { "b", b } }))
    local all = assert(pg.load(folder .. "/x.safetensors", ctx))
    is({ 1, 1 }, all.a)
    is({ { 1, 0 }, { 0, 1 } }, all.b)
    assert.are.equal("ENOENT", select(3, pg.load(folder .. "/x.safetensors", "c", ctx)))
    assert.are.equal("ENOENT", select(3, pg.load(folder .. "/none.npy", ctx)))
    assert.are.equal("ENOENT", select(3, a:save(folder .. "/none/x.npy")))
    assert.error_matches(function() a:save(folder .. "/x.txt") end, "ends in .npy or .safetensors")
    assert.are.equal(1, select("#", pg.tensor({ 1 }, ctx))) -- what a prompt shows is the tensor alone
    local bad, message = pg.load(folder .. "/none.npy", ctx)
    assert.is_nil(bad)
    assert.matches("^ENOENT: .*none.npy", message)
  end)

  it("may hold any number type, either order and any version", function()
    local function reads(expected, dictionary, bytes, dtype, version)
      local t = assert(pg.load(npy("x", dictionary, bytes, version), ctx))
      is(expected, t)
      assert.are.equal(dtype or "F32", t:dtype())
    end
    reads({ 1.5, -2 }, array("<f4", "(2,)"), string.pack("<ff", 1.5, -2))
    reads({ 1.5, -2 }, array("=f8", "(2,)"), string.pack("<dd", 1.5, -2))
    reads({ 1, -1.5, 2 ^ -24, 65504 }, array("<f2", "(4,)"),
      string.pack("<I2I2I2I2", 0x3c00, 0xbe00, 0x0001, 0x7bff))
    reads({ 1, -2.5, 2 ^ 100 }, array("<V2", "(3,)"), string.pack("<I2I2I2", 0x3f80, 0xc020, 0x7180))
    reads({ 1, -2.5 }, array("|V2", "(2,)"), string.pack("<I2I2", 0x3f80, 0xc020))
    reads({ 7, -8 }, array("<i8", "(2,)"), string.pack("<i8i8", 7, -8), "I32")
    reads({ 7, -8 }, array("<i4", "(2,)"), string.pack("<i4i4", 7, -8), "I32")
    reads({ 7, 50256 }, array("<u2", "(2,)"), string.pack("<I2I2", 7, 50256), "I32")
    reads({ -7, 2 }, array("<i2", "(2,)"), string.pack("<i2i2", -7, 2), "I32")
    reads({ 255, 1 }, array("|u1", "(2,)"), "\255\1", "I32")
    reads({ -1, 1 }, array("|i1", "(2,)"), "\255\1", "I32")
    reads({ 0, 1 }, array("|b1", "(2,)"), "\0\1", "I32")
    reads({ (1 << 31) - 1, 3 }, array("<u4", "(2,)"), string.pack("<I4I4", (1 << 31) - 1, 3),
      "I32")
    reads({ 9 }, array("<u8", "(1,)"), string.pack("<I8", 9), "I32")
    reads({ { 1, 3, 5 }, { 2, 4, 6 } }, array("<i4", "(2, 3)", "True"),
      string.pack("<i4i4i4i4i4i4", 1, 2, 3, 4, 5, 6), "I32")
    local elements = string.pack("<ffffff", 1, 2, 3, 4, 5, 6)
    reads({ { 1, 3, 5 }, { 2, 4, 6 } }, array("<f4", "(2, 3)", "True"), elements)
    reads({ { { 1, 5 }, { 3, 0 } }, { { 2, 6 }, { 4, -1 } } }, array("<f4", "(2,2,2)", "True"),
      elements .. string.pack("<ff", 0, -1))
    reads({ { 1, 2, 3 }, { 4, 5, 6 } }, array("<f4", "(2, 3)"), elements, nil, 2)
    reads({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, array("<f4", "(3L, 2L)"), elements, nil, 3)
    reads(5, array("<f4", "()"), string.pack("<f", 5))
    reads({}, array("<f4", "(0, 3)"), "")
    reads({ 4 }, '{"shape": (1,), "fortran_order": False, "descr": "<f4"}', string.pack("<f", 4))
    is({ 7, -8 }, assert(pg.load(npy("i", array("<i8", "(2,)"), string.pack("<i8i8", 7, -8)), ctx))
      :float())
    core.fs.write(folder .. "/ids.safetensors", string.pack("<s8",
      '{"t":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}') .. string.pack("<i8i8", 3, -1))
    is({ 3, -1 }, assert(pg.load(folder .. "/ids.safetensors", "t", ctx)))
    core.fs.write(folder .. "/ids.safetensors", string.pack("<s8",
      '{"t":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}') .. string.pack("<i8i8", 3, 1 << 31))
    local _, message = pg.load(folder .. "/ids.safetensors", "t", ctx)
    assert.matches("EUNSUPPORTED.*element 1 does not fit into 32 bits", message)
  end)

  it("are refused in one line when they are not what they say", function()
    local one = string.pack("<f", 1)
    local function refuses(name, text, dictionary, bytes)
      local path = npy("x", dictionary, bytes or one)
      local none, message, code = pg.load(path, ctx)
      assert.is_nil(none, dictionary)
      assert.are.equal(name, code)
      assert.matches(text, message)
      assert.is_nil(message:find("\n", 1, true))
    end
    refuses("EUNSUPPORTED", "big%-endian %('>f4'%); save it as '<f4'", array(">f4", "(1,)"))
    refuses("EUNSUPPORTED", "type '<c8'", array("<c8", "(1,)"))
    refuses("EUNSUPPORTED", "type '|O'", array("|O", "(1,)"))
    refuses("EFORMAT", "not one simple type", "{'descr': [('a', '<f4')], 'fortran_order': False, "
      .. "'shape': (1,)}")
    refuses("EUNSUPPORTED", "more than 4 dimensions", array("<f4", "(1, 1, 1, 1, 1)"))
    refuses("EFORMAT", "truncated: .* 8 bytes of elements, 4 follow", array("<f4", "(2,)"))
    refuses("EFORMAT", "does not end with its array", array("<f4", "(0,)"))
    refuses("EFORMAT", "more than 2%^63", array("<f4", "(4294967296, 4294967296)"))
    refuses("EFORMAT", "64 bits", array("<f4", "(99999999999999999999,)"))
    refuses("EFORMAT", "something else than whole numbers", array("<f4", "(-1,)"))
    refuses("EFORMAT", "not a tuple", array("<f4", "(1.5,)"))
    refuses("EFORMAT", "not a tuple", array("<f4", "(1)"))
    refuses("EFORMAT", "not a tuple", array("<f4", "1"))
    refuses("EFORMAT", "neither True nor False", array("<f4", "(1,)", "1"))
    refuses("EFORMAT", "lacks", "{'descr': '<f4', 'shape': (1,)}")
    refuses("EFORMAT", "given twice", "{'descr': '<f4', 'descr': '<f4', 'shape': (1,)}")
    refuses("EFORMAT", "follows the dictionary", array("<f4", "(1,)") .. "x")
    refuses("EFORMAT", "not a dictionary", "('descr', '<f4')")
    refuses("EUNSUPPORTED", "element 1 is 2147483648, outside 32 bits", array("<i8", "(2,)"),
      string.pack("<i8i8", 1, 1 << 31))
    refuses("EUNSUPPORTED", "element 0 is 18446744073709551615", array("<u8", "(1,)"),
      string.pack("<i8", -1))
    for _, text in ipairs { "", "\x93NUMPY", "x", "\x93NUMPX\1\0\0\0{}", "\x93NUMPY\1\0\255\255{}",
      "\x93NUMPY\4\0\0\0{}", "\x93NUMPY\2\0\255\255\255\255 " } do
      core.fs.write(folder .. "/y.npy", text)
      local none, message = pg.load(folder .. "/y.npy", ctx)
      assert.is_nil(none)
      assert.matches("y%.npy", message)
    end
    assert.are.equal("EFORMAT", select(3, pg.load(folder .. "/y.npy", ctx)))
  end)

  local numpy = os.execute "python3 -c 'import numpy' 2> /dev/null"

  it("are NumPy's", function()
    if not numpy then return pending "python3-numpy is not installed" end
    local t = core.zeros(ctx, 3, 5):normal_(0, 1, generator)
    assert(t:save(folder .. "/a.npy"))
    assert(t:t():save(folder .. "/b.npy"))
    assert(t[1]:save(folder .. "/c.npy"))
    assert(pg.tensor(7, ctx):save(folder .. "/d.npy"))
    assert(core.zeros(ctx, 0, 2):save(folder .. "/e.npy"))
    core.fs.write(folder .. "/check.py", [[
import sys, numpy as np
folder = sys.argv[1]
a, b, c, d, e = (np.load(f"{folder}/{name}.npy") for name in "abcde")
assert a.dtype == np.float32 and a.shape == (3, 5) and a.flags["C_CONTIGUOUS"]
assert (b == a.T).all() and (c == a[0]).all() and d.shape == () and d == 7 and e.shape == (0, 2)
np.save(f"{folder}/double.npy", a.astype(np.float64) * 2)
np.save(f"{folder}/half.npy", np.asfortranarray(a.astype(np.float16)))
np.save(f"{folder}/long.npy", np.arange(6, dtype=np.int64).reshape(1, 2, 3))
np.save(f"{folder}/big.npy", a.astype(">f4"))
np.save(f"{folder}/flag.npy", a > 0)
]])
    assert(os.execute(("python3 %s/check.py %s"):format(folder, folder)))
    assert.is_true(assert(pg.load(folder .. "/double.npy", ctx)):equal(t * 2))
    -- float16 keeps 11 bits: relative 2^-11, and 2^-25 where it is denormal.
    assert.is_true(assert(pg.load(folder .. "/half.npy", ctx)):allclose(t, 2 ^ -11, 2 ^ -25))
    is({ { { 0, 1, 2 }, { 3, 4, 5 } } }, assert(pg.load(folder .. "/long.npy", ctx)))
    assert.is_true(assert(pg.load(folder .. "/flag.npy", ctx)):float():equal(t:gt(0)))
    assert.are.equal("EUNSUPPORTED", select(3, pg.load(folder .. "/big.npy", ctx)))
  end)
end)
