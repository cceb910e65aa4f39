-- perigee data prepare|check
local check = require "perigee.check"
local console = require "perigee.console"
local core = require "perigee.core"
local data = require "perigee.data"
local errors = require "perigee.errors"
local published = require "perigee.published"

local prepare = {
  name = "data prepare",
  usage = "data prepare --text FILE… --out DIR [--tokenizer FILE | --vocab-size N]",
  description = "Tokenise text into shards with a tokenizer.json and a dataset.json. Without "
    .. "--tokenizer a byte-level BPE vocabulary is trained on the text. "
    .. "Every file is a document; of FILE.jsonl, every line's text.",
  positional = { 0, 0 },
  options = {
    { name = "text", value = "FILE", many = true, spread = true,
      help = "text files (repeatable, or several after one --text)" },
    { name = "field", value = "NAME",
      help = "where a line of FILE.jsonl has its text (default text)" },
    { name = "out", value = "DIR", help = "folder for the shards" },
    { name = "tokenizer", value = "FILE", help = "an existing tokenizer: tokenizer.json, or a "
      .. "folder with vocab.json and merges.txt, or encoder.json and vocab.bpe" },
    { name = "vocab-size", value = "N", kind = "integer", min = 257,
      help = "size of the vocabulary to train (default 4096)" },
    { name = "val-fraction", value = "F", kind = "number", max = 0.5,
      help = "share of the tokens, from the end, for validation (default 0.1)" },
    { name = "shard-tokens", value = "N", kind = "integer", min = 2,
      help = "tokens per shard at most (default 100000000)" },
    { name = "name", value = "NAME", help = "prefix of the shards' names (default text)" },
    { name = "quiet", help = "print nothing but errors" },
  },
}

local inspect = {
  name = "data check", usage = "data check DIR [--paper] [--headers] [--vocab V] [--sequences N]",
  description = "Read every shard completely: header, size, largest token id against the "
    .. "vocabulary. Prints counts, the digest, and the updates per epoch of a batch size.",
  positional = { 1, 1 },
  options = {
    { name = "sequences", value = "N", kind = "integer", min = 1,
      help = "sequences per optimizer batch (default 32, of the paper's data 256)" },
    { name = "context", value = "T", kind = "integer", min = 1,
      help = "tokens per sequence (default 128, of the paper's data 2048)" },
    { name = "vocab", value = "V", kind = "integer", min = 2,
      help = "vocabulary (default: dataset.json, else the tokenizer)" },
    { name = "headers", help = "headers and sizes only: do not read the tokens" },
    { name = "paper", help = "refuse what is not the paper's data, by names and sizes of the "
      .. "shards (its batches and vocabulary are the defaults then)" },
    { name = "train", value = "GLOB", help = "training shards (default *_train_*.bin)" },
    { name = "val", value = "GLOB", help = "validation shards (default *_val_*.bin)" },
  },
}

function prepare.run(options)
  if not options.text then errors.usage("data prepare: expected --text FILE…") end
  if not options.out then errors.usage("data prepare: expected --out DIR") end
  if options.tokenizer and options.vocab_size then
    errors.usage("data prepare: expected --tokenizer or --vocab-size, not both")
  end
  local vocab = not options.tokenizer and (options.vocab_size or 4096) or nil
  if vocab and vocab > 65536 then
    errors.usage("--vocab-size %d is not allowed: expected a whole number from 257 to 65536", vocab)
  end
  local ctx <close> = errors.try(core.context { device = "cpu" })
  local show = console.new { quiet = options.quiet, last = 1, tokens_per_update = 1 }
  local report = errors.try(core.prepare(ctx, {
    texts = options.text, out = options.out, tokenizer = options.tokenizer, vocab = vocab,
    val_fraction = options.val_fraction or 0.1, shard_tokens = options.shard_tokens,
    name = options.name, field = options.field,
    progress = function(what, fraction)
      if show.tty then
        show.err:write(("\r\27[K%s %3.0f %%"):format(what, 100 * fraction))
        show.open_line = true
      end
    end,
  }))
  show:print(("%s: vocabulary %d, %s training tokens in %d shards, %s validation tokens in %d, "
    .. "digest %s"):format(options.out, report.vocab, console.grouped(report.train_tokens),
    report.train_shards, console.grouped(report.val_tokens), report.val_shards, report.digest))
  return 0
end

-- One split: counts and, with the tokens, the largest id and where it is; an id outside the
-- vocabulary is an error.
local function check_split(ctx, folder, pattern, label, vocab, headers)
  local shards = errors.try(core.shards(ctx, folder, pattern))
  if headers then
    print(("%s: %d shards, %s tokens"):format(label, #shards, console.grouped(shards.tokens)))
    return shards
  end
  local largest, place = -1, nil
  for i, shard in ipairs(shards) do
    -- By its own name: listing thousands of shards for each of them takes minutes.
    local plain = not shard.name:find("[%*%?%[%]\\]")
    local id, at = core.shard_scan(ctx, folder, plain and shard.name or pattern, plain and 1 or i)
    errors.try(id, at)
    if vocab and id >= vocab then
      errors.world(("EDATA: %s/%s: token %d at offset %d is outside the vocabulary of %d: expected "
        .. "ids from 0 to %d"):format(folder, shard.name, id, at, vocab, vocab - 1), "EDATA")
    end
    if id > largest then largest, place = id, ("%s, offset %d"):format(shard.name, at) end
    print(("  %s  %s tokens, largest id %d"):format(shard.name, console.grouped(shard.tokens), id))
  end
  print(("%s: %d shards, %s tokens, largest id %d (%s)"):format(label, #shards,
    console.grouped(shards.tokens), largest, place))
  return shards
end

local function updates_per_epoch(shards, time, batch)
  local updates = 0
  for _, shard in ipairs(shards) do updates = updates + (shard.tokens - 1) // time // batch end
  return updates
end

function inspect.run(options, positional)
  local source = data.shards { path = positional[1], train = options.train, val = options.val }
  source.where = nil
  source:require_folder()
  local ctx <close> = errors.try(core.context { device = "cpu" })
  local digest = errors.try(core.digest(ctx, source.path))
  local difference = published.difference(ctx, source, digest)
  if options.paper and difference then -- before hours of reading
    errors.world(("EDATA: %s is not the paper's data (%s): %s"):format(source.path,
      published.title, difference), "EDATA")
  end
  local vocab, from = options.vocab, "--vocab"
  if not vocab then vocab, from = source:vocabulary(ctx) end
  if not vocab and not difference then vocab, from = published.vocab, "the paper's" end
  local train = check_split(ctx, source.path, source.train, "train", vocab, options.headers)
  check_split(ctx, source.path, source.val, "val", vocab, options.headers)
  print(vocab and ("vocabulary: %d (%s)"):format(vocab, from)
    or "vocabulary: unknown (neither dataset.json nor tokenizer.json)")
  local tokenizer_path = source:tokenizer_path()
  if tokenizer_path then
    local tokenizer <close> = errors.try(core.tokenizer(ctx, tokenizer_path))
    if vocab and tokenizer:vocab() > vocab then
      errors.world(("EDATA: %s has %d tokens: the vocabulary is %d (%s)"):format(tokenizer_path,
        tokenizer:vocab(), vocab, from), "EDATA")
    end
  end
  print(("digest: %s%s"):format(digest, difference and "" or " (names and sizes of the paper's "
    .. "shards)"))
  local described = data.read_json(source.path .. "/dataset.json")
  local stated = type(described) == "table" and described.digest
  if stated and stated ~= digest then
    errors.world(("EDATA: %s/dataset.json states digest %s: the shards have %s"):format(
      source.path, check.show(stated), digest), "EDATA")
  end
  local sequences = options.sequences or (difference and 32 or 256)
  local context = options.context or (difference and 128 or 2048)
  local updates = updates_per_epoch(train, context, sequences)
  print(("updates per epoch: %d (%d sequences of %d tokens)"):format(updates, sequences, context))
  -- A size that nobody asked for is information, not a demand on the data.
  if updates == 0 and (options.sequences or options.context) then
    errors.world(("EDATA: no training shard holds one optimizer batch of %d tokens"):format(
      sequences * context + 1), "EDATA")
  end
  return 0
end

return { name = "data", commands = { prepare, inspect } }
