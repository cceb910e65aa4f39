-- The same training in another framework: tools/torch_bench.py measures PyTorch, eager and
-- compiled, with the sizes of a case; a figure of ours then stands beside its best.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"

local peer = {}

-- The script, beside this module's source or below the working directory.
local function script()
  local here = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$")
  local root = here and core.fs.real(here .. "/../../..")
  for _, folder in ipairs { root or ".", "." } do
    local path = folder .. "/tools/torch_bench.py"
    if core.fs.kind(path) == "file" then return path end
  end
  errors.world("ENOENT: --peer torch needs tools/torch_bench.py, which is part of the source",
    "ENOENT")
end

local function quote(word) return "'" .. tostring(word):gsub("'", "'\\''") .. "'" end

local function command_line(case, device)
  local words = { "python3", script(), "--json", "--compute", case.compute, "--head", case.head,
    "--device", device, "--sequences", case.sequences, "--micro", case.micro,
    "--updates", case.updates, "--warmup", math.max(1, case.warmup) }
  for _, name in ipairs { "layers", "width", "heads", "head_dim", "mlp", "vocab", "context" } do
    words[#words + 1] = "--" .. name:gsub("_", "-")
    words[#words + 1] = case.config[name]
  end
  if case.threads then
    words[#words + 1] = "--threads"
    words[#words + 1] = case.threads
  end
  for i, word in ipairs(words) do words[i] = quote(word) end
  return table.concat(words, " ")
end

-- Every mode of the peer on a case: a list of { name, compute, tokens_per_second, … }, best first.
function peer.measure(case, device)
  local pipe = assert(io.popen(command_line(case, device)))
  local text = pipe:read("a")
  local ended, how, code = pipe:close()
  local result = ended and core.json.decode(text)
  if not ended then
    errors.world(("EUNSUPPORTED: the peer ended with %s %d: is PyTorch installed for python3?")
      :format(how == "exit" and "status" or how, code), "EUNSUPPORTED")
  end
  local list = type(result) == "table" and result.cases
  if type(list) ~= "table" or not list[1] then
    errors.world("EFORMAT: the peer printed no cases", "EFORMAT")
  end
  for _, mode in ipairs(list) do
    check.number(nil, "the peer's tokens_per_second", mode.tokens_per_second, { min = 0 })
    mode.torch = result.torch
  end
  table.sort(list, function(a, b) return a.tokens_per_second > b.tokens_per_second end)
  return list
end

-- Of several measurements the one with the median speed.
local function median(list)
  table.sort(list, function(a, b) return a.tokens_per_second < b.tokens_per_second end)
  return list[(#list + 1) // 2]
end

local function faster(a, b)
  return not a or b and b.tokens_per_second > a.tokens_per_second
end

-- Both sides in turns, `rounds` times, in every compute type of `computes`. measure(case) is ours.
-- Returns the cases of --json: "best:", the best of each side, and "fp32:", the best fp32.
function peer.compare(case, computes, rounds, device, measure)
  local ours, theirs = {}, {}
  for _ = 1, rounds do
    for _, compute in ipairs(computes) do
      local this = setmetatable({ compute = compute }, { __index = case })
      ours[compute], theirs[compute] = ours[compute] or {}, theirs[compute] or {}
      table.insert(ours[compute], measure(this))
      table.insert(theirs[compute], peer.measure(this, device)[1])
    end
  end
  local best, rival
  for _, compute in ipairs(computes) do
    ours[compute], theirs[compute] = median(ours[compute]), median(theirs[compute])
    if faster(best, ours[compute]) then best = ours[compute] end
    if faster(rival, theirs[compute]) then rival = theirs[compute] end
  end
  local cases = {}
  local function add(kind, mine, other)
    local shown = setmetatable({}, getmetatable(mine)) -- with the order of its fields
    for key, value in pairs(mine) do shown[key] = value end
    shown.name = kind .. ":" .. mine.name
    shown.peer, shown.peer_tokens_per_second = other, other.tokens_per_second
    shown.ratio_to_peer = mine.tokens_per_second / other.tokens_per_second
    cases[#cases + 1] = shown
  end
  add("best", best, rival)
  if ours.fp32 then add("fp32", ours.fp32, theirs.fp32) end
  return cases
end

return peer
