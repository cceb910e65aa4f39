-- pg.geometry: measurements of a matrix whose rows are points (a head, an increment, a gradient),
-- on any device. All are pure, refuse what is not finite with its place, and say what they cost.
--
-- Each file of geometry/ returns functions that raise, and they are all here in `geometry.raw`, for
-- the other modules. pg.geometry has the same ones with the failures of the world as
-- nil, "NAME: text", "NAME". The common form of a result is in geometry/support.lua.
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local geometry = { raw = {} }

local public, names = {}, {}
for _, part in ipairs { "rows", "shape", "functional", "first_order", "bottleneck", "oracle",
  "logits", "weights" } do
  for name, f in pairs(require("perigee.geometry." .. part)) do
    assert(geometry.raw[name] == nil, name)
    geometry.raw[name] = f
    public[name] = function(...) return errors.guard(f, ...) end
    names[#names + 1] = name
  end
end
table.sort(names)

geometry.public = setmetatable(public, {
  __index = function(_, name)
    errors.misuse("pg.geometry has no '%s'%s", tostring(name), keys.suggestion(name, names))
  end,
})

return geometry
