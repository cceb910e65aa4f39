/* TensorBoard's event files: one record per call of write. */
#include "bind.h"
#include "events.h"
#include <stdlib.h>

static void release_events(pgl_object *o) {
  pg_events_close(o->resource);
}

static const pgl_kind events_kind = {"perigee.events", "event file", 0, release_events};

/* core.events(ctx, folder, step): a new file, which holds from `step` on. */
static int events_open(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *folder = pgl_string(L, 2, "folder");
  const int64_t step = luaL_checkinteger(L, 3);
  pgl_object *o = pgl_new(L, &events_kind, context);
  pg_events *e = NULL;
  int status = pg_events_open(context->resource, folder, step, &e);
  if (status < 0) return pgl_fail(L, context->resource, status);
  o->resource = e;
  return 1;
}

/* The value at the top: a number, a text, or a list of numbers for a histogram. */
static int add_value(lua_State *L, pg_events *e, const char *tag) {
  if (lua_type(L, -1) == LUA_TNUMBER) return pg_events_scalar(e, tag, lua_tonumber(L, -1));
  if (lua_type(L, -1) == LUA_TSTRING) return pg_events_text(e, tag, lua_tostring(L, -1));
  const int64_t n = (int64_t)lua_rawlen(L, -1);
  const int list = lua_gettop(L);
  double *values = lua_newuserdatauv(L, (size_t)(n ? n : 1) * sizeof *values, 0);
  for (int64_t i = 0; i < n; i++) {
    lua_rawgeti(L, list, i + 1);
    values[i] = lua_tonumber(L, -1);
    lua_pop(L, 1);
  }
  const int status = pg_events_histogram(e, tag, values, n);
  lua_pop(L, 1);
  return status;
}

/* All entries before the first is kept: a step is written as a whole or not at all. */
static void check_entries(lua_State *L) {
  for (int64_t i = 1; i <= (int64_t)lua_rawlen(L, 3); i++) {
    if (lua_rawgeti(L, 3, i) != LUA_TTABLE || lua_rawgeti(L, 4, 1) != LUA_TSTRING)
      luaL_error(L, "write: entry %I must be {tag, value} with a string as tag", (LUAI_UACINT)i);
    const int type = lua_rawgeti(L, 4, 2);
    bool good = type == LUA_TNUMBER || type == LUA_TSTRING || type == LUA_TTABLE;
    for (int64_t k = 1; type == LUA_TTABLE && k <= (int64_t)lua_rawlen(L, 6); k++) {
      good = good && lua_rawgeti(L, 6, k) == LUA_TNUMBER;
      lua_settop(L, 6);
    }
    if (!good)
      luaL_error(L, "write: the value of entry %I must be a number, a string or a list of numbers",
                 (LUAI_UACINT)i);
    lua_settop(L, 3);
  }
}

/* events:write(step, { {tag, value}, ... }) */
static int events_write(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &events_kind);
  const int64_t step = luaL_checkinteger(L, 2);
  luaL_checktype(L, 3, LUA_TTABLE);
  lua_settop(L, 3);
  check_entries(L);
  int status = 0;
  for (int64_t i = 1; status == 0 && i <= (int64_t)lua_rawlen(L, 3); i++) {
    lua_rawgeti(L, 3, i);
    lua_rawgeti(L, 4, 1);
    lua_rawgeti(L, 4, 2);
    status = add_value(L, o->resource, lua_tostring(L, 5));
    lua_settop(L, 3);
  }
  if (status == 0) status = pg_events_flush(o->resource, step);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg methods[] = {{"write", events_write}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"events", events_open}, {NULL, NULL}};

void pgl_open_events(lua_State *L) {
  pgl_define(L, &events_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
