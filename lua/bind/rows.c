/* Geometry of the rows of a matrix: what lua/perigee/geometry/ makes results of. Rows count from 1
 * here, from 0 in the core. */
#include "../../core/finite.h"
#include "bind.h"
#include <stdlib.h>

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

/* core.separation(tensor [, list of rows]) -> { value, diameter, rows = {i, j}, multiply_adds,
 * seconds } */
static int separation(lua_State *L) {
  const pgl_tensor *t = pgl_check_tensor(L, 1);
  const int64_t all = t->tensor->ndim > 0 ? t->tensor->shape[0] : 0;
  int64_t *rows = NULL, count = 0;
  pg_separation s;
  if (!lua_isnoneornil(L, 2)) {
    luaL_checktype(L, 2, LUA_TTABLE);
    count = (int64_t)lua_rawlen(L, 2);
    rows = lua_newuserdatauv(L, (size_t)count * sizeof *rows + 1, 0);
    for (int64_t k = 0; k < count; k++) {
      lua_rawgeti(L, 2, k + 1);
      rows[k] = pgl_integer(L, -1, "row", 1, all) - 1;
      lua_pop(L, 1);
    }
  }
  t = pgl_check_tensor(L, 1);
  int status = pg_rows_separation(t->tensor, rows, count, &s);
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  lua_createtable(L, 0, 4);
  pgl_set_number(L, "value", s.value);
  pgl_set_number(L, "diameter", s.diameter);
  set_pair(L, "rows", s.first, s.second);
  pgl_set_number(L, "multiply_adds", s.multiply_adds);
  pgl_set_number(L, "seconds", s.seconds);
  return 1;
}

static void push_doubles(lua_State *L, const double *values, int64_t count) {
  lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
  for (int64_t i = 0; i < count; i++) {
    lua_pushnumber(L, values[i]);
    lua_rawseti(L, -2, i + 1);
  }
}

static void release_ball(void *ball) {
  pg_ball_free(ball);
  free(ball);
}

/* core.ball(tensor, gap) -> { bracket, centre, support = { { row, weight }, ... }, passes, seconds
 * }
 */
static int ball(lua_State *L) {
  const double gap = pgl_number(L, 2, "gap");
  void **box = pgl_own(L, release_ball);
  pg_ball *found = calloc(1, sizeof *found);
  if (!found) return luaL_error(L, "no memory");
  *box = found;
  const pgl_tensor *t = pgl_check_tensor(L, 1);
  int status = pg_rows_ball(t->tensor, gap, found);
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  lua_createtable(L, 0, 5);
  set_bracket(L, found->lower, found->upper);
  push_doubles(L, found->centre, t->tensor->shape[1]);
  lua_setfield(L, -2, "centre");
  lua_createtable(L, (int)found->count, 0);
  for (int64_t i = 0; i < found->count; i++) {
    lua_createtable(L, 0, 2);
    pgl_set_integer(L, "row", found->rows[i] + 1);
    pgl_set_number(L, "weight", found->weights[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "support");
  pgl_set_integer(L, "passes", found->passes);
  pgl_set_number(L, "seconds", found->seconds);
  pgl_disown(box);
  return 1;
}

/* core.spectrum(tensor) -> list of all singular values, decreasing */
static int spectrum(lua_State *L) {
  double *values = NULL;
  int64_t count;
  void **box = pgl_own(L, free);
  const pgl_tensor *t = pgl_check_tensor(L, 1);
  int status = pg_rows_spectrum(t->tensor, &values, &count);
  *box = values;
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  push_doubles(L, values, count);
  pgl_disown(box);
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
    {"diameter", diameter}, {"separation", separation},     {"ball", ball},
    {"spectrum", spectrum}, {"check_finite", check_finite}, {NULL, NULL}};

void pgl_open_rows(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
