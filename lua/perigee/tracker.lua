-- What train/* and performance/* report: sums over the updates since the last report. The sums are
-- part of a checkpoint, so that an interval may span a resume.
local tracker = {}

local Tracker = {}
Tracker.__index = Tracker

-- options: tokens_per_update, max_norm (the threshold), clipping (false: norms are only measured)
function tracker.new(options)
  local self = setmetatable({ tokens_per_update = options.tokens_per_update,
    max_norm = options.max_norm, clipping = options.clipping }, Tracker)
  self:reset()
  return self
end

function Tracker:reset()
  self.sums = { updates = 0, loss = 0.0, norm = 0.0, norm_max = 0.0, over = 0, seconds = 0.0,
    wait = 0.0 }
end

-- step: { loss, norm, seconds, wait_seconds }
function Tracker:add(step)
  local s = self.sums
  s.updates = s.updates + 1
  s.loss = s.loss + step.loss
  s.norm = s.norm + step.norm
  s.norm_max = math.max(s.norm_max, step.norm)
  if step.norm > self.max_norm then s.over = s.over + 1 end
  s.seconds = s.seconds + step.seconds
  s.wait = s.wait + step.wait_seconds
end

-- Mean loss and gradient norm of the interval so far.
function Tracker:means()
  local s = self.sums
  return s.loss / s.updates, s.norm / s.updates
end

-- Fields in the order of the published program; nil when no update has been added.
function Tracker:fields()
  local s = self.sums
  if s.updates == 0 then return nil end
  local loss = s.loss / s.updates
  local share = s.over / s.updates
  return {
    { "train/loss", loss },
    { "train/perplexity", math.exp(loss) },
    { "train/grad_norm", s.norm / s.updates },
    { "train/grad_norm_max", s.norm_max },
    { "train/clipped_fraction", self.clipping and share or 0.0 },
    { "train/would_clip_fraction", share },
    { "performance/tokens_per_second", s.updates * self.tokens_per_update / s.seconds },
    { "performance/seconds_per_update", s.seconds / s.updates },
    { "performance/data_wait_seconds", s.wait },
  }
end

function Tracker:save() return self.sums end

function Tracker:load(sums)
  self:reset()
  for name in pairs(self.sums) do
    if type(sums[name]) == "number" then self.sums[name] = sums[name] end
  end
end

-- Order of the fields in a line. Names that are not listed keep the order in which they were
-- logged, after the listed ones of their group.
local groups = { "progress/", "optimizer/", "diagnostics/", "train/", "performance/", "memory/",
  "validation/loss", "validation/perplexity", "validation/tokens", "validation/seconds",
  "events/evaluation", "validation/hilbert_step/", "events/checkpoint",
  "performance/checkpoint_seconds" }

local function rank(name)
  -- The most specific prefix wins: performance/checkpoint_seconds is not performance/.
  local best, length = #groups + 1, 0
  for i, prefix in ipairs(groups) do
    if #prefix > length and name:sub(1, #prefix) == prefix then best, length = i, #prefix end
  end
  return best
end

-- A stable sort of { name, value } entries into the published order; a repeated name keeps its
-- first place and its last value.
function tracker.ordered(entries)
  local seen, list = {}, {}
  for _, entry in ipairs(entries) do
    local known = seen[entry[1]]
    if known then
      known[2] = entry[2]
    else
      local copy = { entry[1], entry[2], order = #list + 1, rank = rank(entry[1]) }
      seen[entry[1]] = copy
      list[#list + 1] = copy
    end
  end
  table.sort(list, function(a, b)
    if a.rank ~= b.rank then return a.rank < b.rank end
    return a.order < b.order
  end)
  local out = {}
  for i, entry in ipairs(list) do out[i] = { entry[1], entry[2] } end
  return out
end

return tracker
