/* Optimizers: what the registry holds, as tables, and hyperparameters between Lua and C. Those
 * written in Lua are made in optimizer_host.c. */
#include "bind.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void release_optimizer(pgl_object *o) {
  pgl_optimizer *p = o->resource;
  if (p->descriptor == &p->own) {
    for (size_t i = 0; i < p->own.hyper_count; i++) free((char *)p->hypers[i].name);
    for (size_t i = 0; i < p->own.slot_count; i++) free((char *)p->slots[i].name);
    free((char *)p->own.name);
  }
  free(p);
}

/* The uservalue is the increment function of one written in Lua. */
const pgl_kind pgl_optimizer_kind = {"perigee.optimizer", "optimizer", 1, release_optimizer};

/* ---- hyperparameters ----------------------------------------------------------------------------
 */
static void push_number(lua_State *L, const pg_hyper *hyper, double value) {
  if (hyper->kind == PG_HYPER_INTEGER && fabs(value) < 9e15)
    lua_pushinteger(L, (lua_Integer)value);
  else
    lua_pushnumber(L, value);
}

void pgl_push_hyper(lua_State *L, const pg_hyper *hyper, const double *value) {
  switch (hyper->kind) {
  case PG_HYPER_BOOLEAN: lua_pushboolean(L, value[0] != 0); break;
  case PG_HYPER_CHOICE: lua_pushstring(L, hyper->choices[(int)value[0]]); break;
  case PG_HYPER_PAIR:
    lua_createtable(L, 2, 0);
    for (int i = 0; i < 2; i++) {
      lua_pushnumber(L, value[i]);
      lua_rawseti(L, -2, i + 1);
    }
    break;
  default: push_number(L, hyper, value[0]);
  }
}

static int wrong_kind(lua_State *L, const pg_optimizer *o, const pg_hyper *hyper,
                      const char *expected) {
  return luaL_error(L, "%s.%s: %s expected, got %s", o->name, hyper->name, expected,
                    pgl_describe(L, -1));
}

/* The value at the top as hyperparameter `hyper`. */
static void read_hyper(lua_State *L, const pg_optimizer *o, const pg_hyper *hyper, double *value) {
  const int type = lua_type(L, -1);
  switch (hyper->kind) {
  case PG_HYPER_NUMBER:
    if (type != LUA_TNUMBER) wrong_kind(L, o, hyper, "a number");
    *value = lua_tonumber(L, -1);
    break;
  case PG_HYPER_INTEGER: {
    int exact = 0;
    lua_Integer integer = type == LUA_TNUMBER ? lua_tointegerx(L, -1, &exact) : 0;
    if (!exact) wrong_kind(L, o, hyper, "an integer");
    *value = (double)integer;
    break;
  }
  case PG_HYPER_BOOLEAN:
    if (type != LUA_TBOOLEAN) wrong_kind(L, o, hyper, "true or false");
    *value = lua_toboolean(L, -1);
    break;
  case PG_HYPER_PAIR:
    if (type != LUA_TTABLE || lua_rawlen(L, -1) != 2) wrong_kind(L, o, hyper, "a table {a, b}");
    for (int i = 0; i < 2; i++) {
      if (lua_rawgeti(L, -1, i + 1) != LUA_TNUMBER) wrong_kind(L, o, hyper, "two numbers {a, b}");
      value[i] = lua_tonumber(L, -1);
      lua_pop(L, 1);
    }
    break;
  case PG_HYPER_CHOICE: {
    luaL_Buffer allowed;
    int index = 0;
    if (type == LUA_TSTRING)
      for (; hyper->choices[index]; index++)
        if (strcmp(hyper->choices[index], lua_tostring(L, -1)) == 0) {
          *value = index;
          return;
        }
    lua_pushvalue(L, -1);
    const char *got = pgl_describe(L, -1);
    luaL_buffinit(L, &allowed);
    for (int i = 0; hyper->choices[i]; i++) {
      luaL_addstring(&allowed, i ? ", \"" : "\"");
      luaL_addstring(&allowed, hyper->choices[i]);
      luaL_addstring(&allowed, "\"");
    }
    luaL_pushresult(&allowed);
    luaL_error(L, "%s.%s: one of %s expected, got %s", o->name, hyper->name, lua_tostring(L, -1),
               got);
  }
  }
}

void pgl_read_hypers(lua_State *L, int index, const pg_optimizer *o, double values[PG_MAX_HYPERS]) {
  index = lua_absindex(L, index);
  if (lua_type(L, index) != LUA_TTABLE)
    luaL_error(L, "%s: a table of hyperparameters expected, got %s", o->name,
               pgl_describe(L, index));
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    const pg_hyper *hyper = NULL;
    int at = -1;
    if (lua_type(L, -2) == LUA_TSTRING)
      at = pg_optimizer_hyper_index(o, lua_tostring(L, -2), &hyper);
    if (at < 0) {
      luaL_Buffer names;
      lua_pushvalue(L, -2);
      const char *key = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : pgl_describe(L, -1);
      luaL_buffinit(L, &names);
      for (size_t i = 0; i < o->hyper_count; i++) {
        luaL_addstring(&names, i ? ", " : "");
        luaL_addstring(&names, o->hypers[i].name);
      }
      luaL_pushresult(&names);
      luaL_error(L, "%s has no hyperparameter '%s'; it has: %s", o->name, key, lua_tostring(L, -1));
    }
    read_hyper(L, o, hyper, &values[at]);
  }
}

/* ---- descriptions -------------------------------------------------------------------------------
 */
static void push_hyper_description(lua_State *L, const pg_hyper *hyper) {
  static const char *const kinds[] = {"number", "integer", "boolean", "pair", "choice"};
  lua_createtable(L, 0, 8);
  pgl_set_string(L, "name", hyper->name);
  pgl_set_string(L, "kind", kinds[hyper->kind]);
  pgl_set_string(L, "help", hyper->help ? hyper->help : "");
  if (!isnan(hyper->initial[0])) { /* NaN: there is no default */
    pgl_push_hyper(L, hyper, hyper->initial);
    lua_setfield(L, -2, "default");
  }
  if (hyper->kind == PG_HYPER_CHOICE) {
    lua_newtable(L);
    for (int i = 0; hyper->choices[i]; i++) {
      lua_pushstring(L, hyper->choices[i]);
      lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "choices");
  } else if (hyper->kind != PG_HYPER_BOOLEAN) {
    if (isfinite(hyper->min)) {
      push_number(L, hyper, hyper->min);
      lua_setfield(L, -2, "min");
      pgl_set_boolean(L, "open_min", hyper->open_min);
    }
    if (isfinite(hyper->max)) {
      push_number(L, hyper, hyper->max);
      lua_setfield(L, -2, "max");
      pgl_set_boolean(L, "open_max", hyper->open_max);
    }
  }
}

static void push_description(lua_State *L, const pg_optimizer *o) {
  static const char *const shapes[] = {"matrix",         "row",    "column",      "rows_square",
                                       "columns_square", "scalar", "rows_factor", "columns_factor"};
  lua_createtable(L, 0, 5);
  pgl_set_string(L, "name", o->name);
  pgl_set_string(L, "help", o->help ? o->help : "");
  pgl_set_boolean(L, "frozen", o->increment == NULL);
  lua_createtable(L, (int)o->hyper_count, 0);
  for (size_t i = 0; i < o->hyper_count; i++) {
    push_hyper_description(L, &o->hypers[i]);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "hypers");
  lua_createtable(L, (int)o->slot_count, 0);
  for (size_t i = 0; i < o->slot_count; i++) {
    lua_createtable(L, 0, 3);
    pgl_set_string(L, "name", o->slots[i].name);
    pgl_set_string(L, "shape", shapes[o->slots[i].shape]);
    pgl_set_string(L, "dtype", pg_dtype_name(o->slots[i].dtype));
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "slots");
}

/* core.optimizers() -> list of descriptions */
static int optimizers(lua_State *L) {
  const pg_optimizer *o;
  lua_newtable(L);
  for (size_t i = 0; (o = pg_optimizer_at(i)); i++) {
    push_description(L, o);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  return 1;
}

/* optimizer:describe() -> the same table for one */
static int optimizer_describe(lua_State *L) {
  push_description(L,
                   ((pgl_optimizer *)pgl_check(L, 1, &pgl_optimizer_kind)->resource)->descriptor);
  return 1;
}

static int optimizer_name(lua_State *L) {
  pgl_optimizer *p = pgl_check(L, 1, &pgl_optimizer_kind)->resource;
  lua_pushstring(L, p->descriptor->name);
  return 1;
}

/* optimizer:check(hypers) -> all hypers with defaults filled in; raises for unknown names, wrong
 * kinds and values out of range. */
static int optimizer_check(lua_State *L) {
  pgl_optimizer *p = pgl_check(L, 1, &pgl_optimizer_kind)->resource;
  const pg_optimizer *o = p->descriptor;
  double values[PG_MAX_HYPERS];
  struct pg_context scratch;
  pgl_scratch(&scratch);
  lua_settop(L, 2);
  pg_optimizer_defaults(o, values);
  if (!lua_isnil(L, 2)) pgl_read_hypers(L, 2, o, values);
  int status = pg_optimizer_check(&scratch, o, values);
  if (status < 0) return pgl_fail(L, &scratch, status);
  lua_createtable(L, 0, (int)o->hyper_count);
  for (size_t i = 0; i < o->hyper_count; i++) {
    pgl_push_hyper(L, &o->hypers[i], &values[pg_optimizer_hyper_index(o, o->hypers[i].name, NULL)]);
    lua_setfield(L, -2, o->hypers[i].name);
  }
  return 1;
}

/* optimizer:slot_bytes(rows, columns): of all slots of such a parameter */
static int optimizer_slot_bytes(lua_State *L) {
  const pg_optimizer *o =
      ((pgl_optimizer *)pgl_check(L, 1, &pgl_optimizer_kind)->resource)->descriptor;
  const int64_t rows = pgl_integer(L, 2, "rows", 1, INT64_MAX);
  const int64_t columns = pgl_integer(L, 3, "columns", 1, INT64_MAX);
  int64_t bytes = 0;
  for (size_t i = 0; i < o->slot_count; i++) {
    int64_t shape[2];
    pg_slot_dims(&o->slots[i], rows, columns, shape);
    bytes += shape[0] * shape[1] * (int64_t)pg_dtype_size(o->slots[i].dtype);
  }
  lua_pushinteger(L, bytes);
  return 1;
}

/* optimizer:factor(hypers, rows, columns) */
static int optimizer_factor(lua_State *L) {
  pgl_optimizer *p = pgl_check(L, 1, &pgl_optimizer_kind)->resource;
  const pg_optimizer *o = p->descriptor;
  const int64_t rows = pgl_integer(L, 3, "rows", 1, INT64_MAX);
  const int64_t columns = pgl_integer(L, 4, "columns", 1, INT64_MAX);
  double values[PG_MAX_HYPERS];
  pg_optimizer_defaults(o, values);
  pgl_read_hypers(L, 2, o, values);
  lua_pushnumber(L, o->factor ? o->factor(values, rows, columns) : 1);
  return 1;
}

/* core.optimizer(name) */
static int optimizer(lua_State *L) {
  const char *name = pgl_string(L, 1, "name");
  const pg_optimizer *found = pg_optimizer_find(name);
  if (!found) {
    luaL_Buffer names;
    luaL_buffinit(L, &names);
    for (size_t i = 0; pg_optimizer_at(i); i++) {
      luaL_addstring(&names, i ? ", " : "");
      luaL_addstring(&names, pg_optimizer_at(i)->name);
    }
    luaL_pushresult(&names);
    return luaL_error(L, "there is no optimizer '%s'; there are %s", name, lua_tostring(L, -1));
  }
  pgl_object *o = pgl_new(L, &pgl_optimizer_kind, NULL);
  pgl_optimizer *p = calloc(1, sizeof *p);
  if (!p) return pgl_fail_text(L, PG_ENOMEM, NULL);
  o->resource = p;
  p->descriptor = found;
  return 1;
}

static const luaL_Reg methods[] = {
    {"describe", optimizer_describe},     {"name", optimizer_name},
    {"check", optimizer_check},           {"factor", optimizer_factor},
    {"slot_bytes", optimizer_slot_bytes}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"optimizers", optimizers},
                                     {"optimizer", optimizer},
                                     {"define_optimizer", pgl_define_optimizer},
                                     {NULL, NULL}};

void pgl_open_optimizer(lua_State *L) {
  pgl_define(L, &pgl_optimizer_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
