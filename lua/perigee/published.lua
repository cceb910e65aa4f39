-- The data of the paper's runs: what can be known of a folder from names and sizes alone. The
-- paper states shards, tokens and vocabulary (appendix B); its program identifies a folder by the
-- digest of REFERENCE A2, which says nothing about the tokens inside the files.
local core = require "perigee.core"
local errors = require "perigee.errors"

local published = {
  digest = "87edf1844351c445e687ea865215b5fecff3a8b8052dff5b7263ea30712376f4",
  vocab = 50257,
  train_shards = 890,
  shard_tokens = 100000000,
  title = "FineWeb100B, GPT-2 tokens: 890 training shards and a validation shard of 100000000",
}

-- Names of the shards of a split, "train" or "val".
local function expected(split)
  if split == "val" then return { "fineweb_val_000000.bin" } end
  local names = {}
  for i = 1, published.train_shards do names[i] = ("fineweb_train_%06d.bin"):format(i) end
  return names
end

-- The first way in which the shards of one split (core.shards) are not the paper's, or nil.
local function split_difference(shards, split)
  local wanted = expected(split)
  for i, name in ipairs(wanted) do
    local shard = shards[i]
    if not shard then
      return ("%s: %d shards, the paper's has %d: %s is missing"):format(split, #shards, #wanted,
        name)
    elseif shard.name ~= name then
      return ("%s: shard %d is %s, the paper's is %s"):format(split, i, shard.name, name)
    elseif shard.tokens ~= published.shard_tokens then
      return ("%s: %s has %d tokens, the paper's has %d"):format(split, name, shard.tokens,
        published.shard_tokens)
    end
  end
  if #shards > #wanted then
    return ("%s: %d shards, the paper's has %d: %s is not of it"):format(split, #shards, #wanted,
      shards[#wanted + 1].name)
  end
end

-- nil when the folder of `source` (pg.data.shards) has the paper's digest, else what differs.
function published.difference(ctx, source, digest)
  if digest == published.digest then return nil end
  for _, split in ipairs { "train", "val" } do
    local shards = errors.try(core.shards(ctx, source.path, source[split]))
    local found = split_difference(shards, split)
    if found then return found end
  end
  return "both splits are the paper's, and the folder has other shards beside them"
end

return published
