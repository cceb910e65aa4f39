/* Geometry of the rows of a matrix: what lua/perigee/geometry/ makes results of. Rows count from 1
 * here, from 0 in the core. */
#include "bind.h"
#include "../../core/finite.h"

/* t[field] = { first, second } of two rows counted from 0; nothing when there is no pair. */
static void set_pair(lua_State *L, const char *field, int64_t first, int64_t second) {
  if (first < 0) return;
  lua_createtable(L, 2, 0);
  lua_pushinteger(L, first + 1);
  lua_rawseti(L, -2, 1);
  lua_pushinteger(L, second + 1);
  lua_rawseti(L, -2, 2);
  lua_setfield(L, -2, field);
}

/* t.bracket = { lower, upper } */
static void set_bracket(lua_State *L, double lower, double upper) {
  lua_createtable(L, 0, 2);
  pgl_set_number(L, "lower", lower);
  pgl_set_number(L, "upper", upper);
  lua_setfield(L, -2, "bracket");
}

/* core.diameter(tensor) -> { value, rows = {i, j} or nil, bracket, multiply_adds, seconds } */
static int diameter(lua_State *L) {
  pgl_tensor *t = pgl_check_tensor(L, 1);
  pg_diameter d;
  int status = pg_geometry_diameter(t->tensor, &d);
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  lua_createtable(L, 0, 5);
  pgl_set_number(L, "value", d.value);
  set_pair(L, "rows", d.first, d.second);
  set_bracket(L, d.lower, d.upper);
  pgl_set_number(L, "multiply_adds", d.multiply_adds);
  pgl_set_number(L, "seconds", d.seconds);
  return 1;
}

/* core.check_finite(tensor, name) -> true, or nil with the place of the first number that is not */
static int check_finite(lua_State *L) {
  const pgl_tensor *t = pgl_check_tensor(L, 1);
  const char *name = pgl_string(L, 2, "name");
  if (t->tensor->dtype != PG_F32 || t->tensor->ndim != 2)
    return luaL_error(L, "%s: an F32 matrix expected, got %s %s", name,
                      pg_dtype_name(t->tensor->dtype), pgl_push_shape(L, t->tensor));
  int status = pg__check_finite(t->tensor, name);
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg functions[] = {
    {"diameter", diameter}, {"check_finite", check_finite}, {NULL, NULL}};

void pgl_open_rows(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
