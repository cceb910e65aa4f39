-- Models that other programs wrote, as Hugging Face has them, for training: model.init = FOLDER.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local data, trained

local function train(recipe, options)
  options.threads, options.quiet = 1, true
  local run = assert(pg.open(recipe, options))
  for _ in run:updates() do end -- luacheck: ignore 542
  local checkpoint = run.last_checkpoint
  run:close()
  return options.out, checkpoint
end

-- The same model in other words: what model.init needs of a checkpoint, in files of two tensors.
local function foreign(checkpoint)
  local folder = support.folder() .. "/model"
  assert(core.fs.make(folder))
  local ctx <close> = assert(core.context { device = "cpu", threads = 1 })
  local map, list, number = {}, {}, 0
  local function flush()
    if #list == 0 then return end
    number = number + 1
    local name = ("model-%05d.safetensors"):format(number)
    assert(core.save_tensors(ctx, folder .. "/" .. name, list))
    for _, entry in ipairs(list) do
      map[entry[1]] = name
      entry[2]:close()
    end
    list = {}
  end
  for _, entry in ipairs(assert(core.tensors(ctx, checkpoint))) do
    list[#list + 1] = { entry.name, assert(core.load_tensor(ctx, checkpoint, entry.name)) }
    if #list == 2 then flush() end
  end
  flush()
  support.write(folder .. "/model.safetensors.index.json", core.json.encode { weight_map = map })
  support.write(folder .. "/config.json", support.read(checkpoint .. "/config.json"))
  return folder
end

-- The config.json of `folder` with changes; core.json.null takes a key away.
local function change(folder, changes)
  local config = support.json(folder .. "/config.json")
  for key, value in pairs(changes) do
    if value == core.json.null then config[key] = nil else config[key] = value end
  end
  support.write(folder .. "/config.json", core.json.encode(config))
end

local function recipe(init, changes)
  changes = changes or {}
  local model = { init = init }
  for key, value in pairs(changes.model or {}) do model[key] = value end
  return pg.recipe {
    name = "import", seed = 5, model = model, data = { path = data },
    batch = { sequences = 4 }, updates = changes.updates or 2,
    optimizers = { { role = "embedding", pg.optim.adamw { lr = 1e-3 } },
      { role = "backbone", pg.optim.muon { lr = 1e-3 } },
      { role = "head", pg.optim.rownorm { lr = 1e-3 } } },
  }
end

local function weights_of(path)
  local ctx <close> = assert(core.context { device = "cpu", threads = 1 })
  local model <close> = assert(core.model(ctx, assert(core.checkpoint_config(ctx, path))))
  assert(model:load(path))
  return model:sha256()
end

describe("model.init", function()
  setup(function()
    data = support.data()
    local out
    out, trained = train(support.recipe(pg, data, { updates = 2 }),
      { out = support.folder() .. "/run" })
    assert(out and trained)
  end)
  teardown(support.clean)

  it("takes a folder's sizes and weights, bit for bit, in one file or several", function()
    local sizes = support.json(trained:match "^(.*)/checkpoints/" .. "/config.json").model
    for _, folder in ipairs { trained, foreign(trained) } do
      local out, last = train(recipe(folder), { out = support.folder() .. "/run" })
      local config = support.json(out .. "/config.json")
      for _, key in ipairs { "layers", "width", "heads", "head_dim", "mlp", "vocab", "context",
        "norm_eps", "rope_base" } do
        assert.equal(sizes[key], config.model[key])
      end
      assert.equal("model.init", config.data.vocabulary_from)
      assert.equal(weights_of(trained), config.initial_weights)
      assert.are_not.equal(weights_of(trained), weights_of(last))
    end
  end)

  it("is read at the start alone: a run goes on without the folder", function()
    local folder = foreign(trained)
    local made = support.folder()
    local want = weights_of(select(2, train(recipe(folder, { updates = 4 }),
      { out = made .. "/whole" })))
    local file = support.write(made .. "/recipe.lua", ([[
local pg = require "perigee"
return pg.recipe {
  name = "import", seed = 5, model = { init = %q }, data = { path = %q }, batch = { sequences = 4 },
  updates = 4,
  optimizers = { { role = "embedding", pg.optim.adamw { lr = 1e-3 } },
    { role = "backbone", pg.optim.muon { lr = 1e-3 } },
    { role = "head", pg.optim.rownorm { lr = 1e-3 } } },
}]]):format(folder, data))
    local code, _, err = support.perigee { "train", file, "--out", made .. "/run", "--max-updates",
      "2", "--quiet" }
    assert.equal(0, code, err)
    assert(core.fs.remove(folder))
    code, _, err = support.perigee { "resume", made .. "/run", "--quiet" }
    assert.equal(0, code, err)
    assert.equal(want, weights_of(made .. "/run/checkpoints/00000004"))
    -- Nothing to go on from: it is needed after all.
    assert(core.fs.remove(made .. "/run/checkpoints"))
    code, _, err = support.perigee { "resume", made .. "/run", "--quiet" }
    assert.equal(1, code)
    assert.is_truthy(err:find("model", 1, true), err)
  end)

  it("leaves the context to the recipe, and refuses other sizes", function()
    local out = train(recipe(trained, { model = { context = 4 } }),
      { out = support.folder() .. "/run" })
    assert.equal(4, support.json(out .. "/config.json").model.context)
    local function refused(part, model, folder)
      local ok, message = pcall(train, recipe(folder or trained, { model = model }),
        { out = support.folder() .. "/no" })
      assert.is_false(ok)
      assert.is_truthy(tostring(message):find(part, 1, true), tostring(message))
    end
    refused("model.width = 32 differs from the 16", { width = 32 })
    refused("model.vocab = 100 differs from the 97", { vocab = 100 })
    refused("differs from the 1 of", { preset = "190m" })
    local file = trained .. "/model.safetensors"
    refused("model.layers is missing and model.init", {}, file)
    local folder = foreign(trained)
    change(folder, { vocab_size = 96 })
    refused("has 97 tokens (dataset.json), that of model.init", {}, folder)
  end)

  it("names what it does not support", function()
    local folder = foreign(trained)
    local ctx <close> = assert(core.context { device = "cpu", threads = 1 })
    local before = support.read(folder .. "/config.json")
    local null = core.json.null
    local function answer(changes)
      support.write(folder .. "/config.json", before)
      change(folder, changes)
      return core.checkpoint_config(ctx, folder)
    end
    local function refused(part, changes)
      local config, message = answer(changes)
      assert.is_nil(config)
      assert.is_truthy(message:find(part, 1, true), message)
      assert.is_truthy(message:find("config.json", 1, true), message)
    end
    refused('model_type = "llama" is not supported; allowed: "qwen3"', { model_type = "llama" })
    refused("model_type = (none)", { model_type = null })
    refused('allowed: ["Qwen3ForCausalLM"]', { architectures = { "Qwen3Model" } })
    refused("tie_word_embeddings = true is not supported; allowed: false",
      { tie_word_embeddings = true })
    refused("attention_bias = true", { attention_bias = true })
    refused("use_sliding_window = true", { use_sliding_window = true })
    refused('layer_types = "sliding_attention"', { layer_types = { "sliding_attention" } })
    refused('hidden_act = "gelu" is not supported; allowed: "silu"', { hidden_act = "gelu" })
    refused("attention_dropout = 0.1", { attention_dropout = 0.1 })
    refused("quantization_config = {", { quantization_config = { bits = 4 } })
    refused("num_key_value_heads = 1 is not supported; allowed: 2", { num_key_value_heads = 1 })
    refused('rope_type = "yarn" is not supported', { rope_scaling = { rope_type = "yarn" } })
    refused('rope_type = "linear"', { rope_scaling = { type = "linear", factor = 2.0 } })
    refused("partial_rotary_factor = 0.5",
      { rope_parameters = { rope_theta = 1e4, partial_rotary_factor = 0.5 } })
    refused('"rope_theta" is 10000 and, in "rope_parameters", 5000: expected the same',
      { rope_parameters = { rope_theta = 5000.0 } })
    refused("model.head_dim is 5; it must be even", { head_dim = 5 })
    refused('"head_dim" must be at least 1', { head_dim = 0 })
    refused('"hidden_size" must be an integer', { hidden_size = "16" })
    refused('"num_hidden_layers" must be an integer', { num_hidden_layers = null })
    refused("model.norm_eps is 2", { rms_norm_eps = 2.0 })
    support.write(folder .. "/config.json", "[1]")
    assert.is_truthy(select(2, core.checkpoint_config(ctx, folder)):find("not a JSON object", 1,
      true))
    -- As transformers 5 writes it, and with everything that has a default left out.
    local config = assert(answer { rope_theta = null, rope_parameters =
      { rope_type = "default", rope_theta = 2e4 }, sliding_window = null, rms_norm_eps = null,
      num_key_value_heads = null, layer_types = { "full_attention" }, perigee = null })
    assert.equal(2e4, config.rope_base)
    assert.equal(1e-6, config.norm_eps)
    assert.equal(128, assert(answer { head_dim = null }).head_dim) -- transformers' default
  end)

  it("compares the tokenizer with that of the data", function()
    local text = support.text_data()
    local folder = foreign(trained)
    change(folder, { vocab_size = 300 })
    local changed = support.read(text .. "/tokenizer.json")
    support.write(folder .. "/tokenizer.json", changed)
    local function message()
      local rec = recipe(folder):with { data = { path = text } }
      local ok, e = pcall(train, rec, { out = support.folder() .. "/no" })
      assert.is_false(ok)
      return tostring(e)
    end
    -- The same: the next obstacle is the weights' shape.
    assert.is_truthy(message():find("has shape [97, 16]; the model needs [300, 16]", 1, true))
    local a, b = changed:find('"a": ?%d+', 1)
    assert(a)
    local swapped = changed:gsub('"a": ?(%d+)', '"a": @%1'):gsub('"b": ?(%d+)', '"b": #%1')
    local of_a, of_b = swapped:match '"a": @(%d+)', swapped:match '"b": #(%d+)'
    swapped = swapped:gsub("@%d+", of_b):gsub("#%d+", of_a)
    support.write(folder .. "/tokenizer.json", swapped)
    local told = message()
    assert.is_truthy(told:find(("token %d is"):format(math.min(of_a, of_b)), 1, true), told)
    assert.is_truthy(b)
  end)
end)
