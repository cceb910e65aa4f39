-- Data sources of recipes: pg.data.shards{ path = … }, a folder of token shards (SPEC §2).
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"

local data = {}

local Shards = { __name = "pg.data.shards" }
Shards.__index = Shards

local known = { "path", "train", "val", "test", "tokenizer", "read_ahead" }
data.patterns = { train = "*_train_*.bin", val = "*_val_*.bin" }

function data.shards(options)
  local where = errors.where()
  check.table(where, "pg.data.shards", options, "{ path = FOLDER, … }")
  keys.check(options, known, "pg.data.shards", where)
  check.string(where, "data.path", options.path)
  for _, split in ipairs { "train", "val", "test", "tokenizer" } do
    if options[split] ~= nil then check.string(where, "data." .. split, options[split]) end
  end
  if options.read_ahead ~= nil then
    check.integer(where, "data.read_ahead", options.read_ahead, 1, 4096)
  end
  local self = { where = where }
  for _, key in ipairs(known) do self[key] = options[key] end
  self.train = self.train or data.patterns.train
  self.val = self.val or data.patterns.val
  return setmetatable(self, Shards)
end

function data.from(value, where)
  if getmetatable(value) == Shards then return value end
  if type(value) == "table" and getmetatable(value) == nil then return data.shards(value) end
  check.fail(where, "data", value, "pg.data.shards { path = FOLDER }")
end

-- The same source in another folder (a resume from another working directory).
function Shards:at(path)
  local copy = {}
  for k, v in pairs(self) do copy[k] = v end
  copy.path = path
  return setmetatable(copy, Shards)
end

local function read_json(path)
  if core.fs.kind(path) ~= "file" then return nil end
  local text = errors.try(core.fs.read(path))
  local value, message, name = core.json.decode(text)
  if value == nil then errors.world(("%s: %s"):format(path, message), name) end
  return value
end
data.read_json = read_json

-- Path of the tokenizer of a data folder, or nil.
function Shards:tokenizer_path()
  if self.tokenizer then
    if core.fs.kind(self.tokenizer) == nil then
      errors.world(("ENOENT: data.tokenizer = %q does not exist"):format(self.tokenizer), "ENOENT")
    end
    return self.tokenizer
  end
  local path = self.path .. "/tokenizer.json"
  return core.fs.kind(path) == "file" and path or nil
end

-- The folder must exist before anything else is tried.
function Shards:require_folder()
  if core.fs.kind(self.path) ~= "directory" then
    errors.world(("%sENOENT: data.path = %s is not a folder: expected one with shards such as "
      .. "NAME_train_000001.bin (made by 'perigee data prepare')")
      :format(self.where and self.where .. ": " or "", check.show(self.path)), "ENOENT")
  end
end

-- Vocabulary of the data: dataset.json, else the tokenizer, else nil; and where it came from.
function Shards:vocabulary(ctx)
  local path = self.path .. "/dataset.json"
  local description = read_json(path)
  local vocab = type(description) == "table" and (description.vocab or description.vocabulary)
  if vocab then
    if not math.tointeger(vocab) or vocab < 2 then
      errors.world(("EFORMAT: %s: vocab = %s is not allowed: expected a whole number >= 2")
        :format(path, check.show(vocab)), "EFORMAT")
    end
    return math.tointeger(vocab), "dataset.json"
  end
  local tokenizer = self:tokenizer_path()
  if tokenizer then
    local tok <close> = errors.try(core.tokenizer(ctx, tokenizer))
    return tok:vocab(), "tokenizer.json"
  end
end

-- Groups of `micro` sequences of `time` tokens in the validation split (SPEC §2).
function Shards:validation_groups(ctx, time, micro)
  local shards = errors.try(core.shards(ctx, self.path, self.val))
  local groups = 0
  for _, shard in ipairs(shards) do
    groups = groups + (shard.tokens - 1) // time // micro
  end
  return groups, shards.tokens
end

data.public = setmetatable({ shards = data.shards }, {
  __index = function(_, name)
    errors.misuse("pg.data has no '%s'%s", tostring(name), keys.suggestion(name, { "shards" }))
  end,
})

return data
