-- Synthetic training data for measurements: one shard of random tokens in a temporary folder.
local core = require "perigee.core"
local errors = require "perigee.errors"

local data = {}

-- How often tokens of a text occur falls about as 1/rank; so do these: floor(V^u), u uniform. A
-- uniform choice would touch every row of the embedding and repeat none.
local function tokens(count, vocab, seed)
  math.randomseed(seed)
  local parts, slice = {}, {}
  for i = 1, count do
    slice[#slice + 1] = math.min(vocab - 1, math.floor(vocab ^ math.random()) - 1)
    if #slice == 128 or i == count then
      parts[#parts + 1] = string.pack(("<" .. ("I2"):rep(#slice)), table.unpack(slice))
      slice = {}
    end
  end
  return table.concat(parts)
end

-- A new folder, in TMPDIR or /tmp, with a training shard for `updates` updates; remove it with
-- core.fs.remove.
function data.make(config, sequences, updates)
  local parent, number = os.getenv "TMPDIR" or "/tmp", 0
  local folder
  repeat
    number = number + 1
    folder = ("%s/perigee-bench-%d-%d"):format(parent, core.host().pid, number)
    local made, message, name = core.fs.make_exclusive(folder)
    if not made and name ~= "EEXIST" then errors.world(message, name) end
  until made
  local count = sequences * config.context * updates + 1
  local header = string.pack("<i4i4i4", 20240520, 1, count)
  local ok, message, name = core.fs.write(folder .. "/bench_train_000.bin",
    header .. ("\0"):rep(1024 - #header) .. tokens(count, config.vocab, 0))
  if not ok then
    core.fs.remove(folder)
    errors.world(message, name)
  end
  return folder
end

return data
