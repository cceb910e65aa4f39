/* What is known of a run before it exists: its parameters, its memory, its data. */
#include "bind.h"

static void release_model(void *model) {
  pg_model_free(model);
}

/* core.model_parameters(config) -> list of { name, role, layer, rows, columns }, in model order */
static int model_parameters(lua_State *L) {
  struct pg_context scratch;
  pg_model_config config;
  pg_model *model;
  pgl_scratch(&scratch);
  lua_settop(L, 1);
  pgl_read_config(L, 1, &config);
  void **box = pgl_own(L, release_model);
  const int status = pg_model_describe(&scratch, &config, &model);
  if (status < 0) return pgl_fail(L, &scratch, status);
  *box = model;
  lua_createtable(L, (int)pg_model_count(model), 0);
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    lua_createtable(L, 0, 5);
    pgl_set_string(L, "name", p->name);
    pgl_set_string(L, "role", pg_role_name(p->role));
    if (p->layer >= 0) pgl_set_integer(L, "layer", p->layer + 1);
    pgl_set_integer(L, "rows", p->rows);
    pgl_set_integer(L, "columns", p->columns);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  pgl_disown(box);
  return 1;
}

/* The list { { optimizer, index..., hypers }, ... } at `index`, entries, numbers and values in
 * userdata that are pushed. */
static pg_run_entry *read_entries(lua_State *L, int index, size_t *count) {
  *count = (size_t)lua_rawlen(L, index);
  pg_run_entry *entries = lua_newuserdatauv(L, sizeof *entries * *count + 1, 1);
  lua_createtable(L, (int)*count, 0); /* keeps the numbers */
  for (size_t e = 0; e < *count; e++) {
    lua_rawgeti(L, index, (lua_Integer)e + 1);
    luaL_checktype(L, -1, LUA_TTABLE);
    lua_rawgeti(L, -1, 1);
    if (!luaL_testudata(L, -1, pgl_optimizer_kind.type))
      luaL_error(L, "estimate: an optimizer expected, got %s", pgl_describe(L, -1));
    const pgl_optimizer *o = pgl_check(L, -1, &pgl_optimizer_kind)->resource;
    lua_pop(L, 1);
    const size_t parameters = (size_t)lua_rawlen(L, -1) - 1;
    double *values = lua_newuserdatauv(L, PG_MAX_HYPERS * sizeof *values, 0);
    lua_rawseti(L, -3, 2 * (lua_Integer)e + 1);
    size_t *list = lua_newuserdatauv(L, sizeof *list * parameters + 1, 0);
    lua_rawseti(L, -3, 2 * (lua_Integer)e + 2);
    pg_optimizer_defaults(o->descriptor, values);
    if (pgl_raw(L, -1, "hypers")) {
      pgl_read_hypers(L, -1, o->descriptor, values);
      lua_pop(L, 1);
    }
    for (size_t i = 0; i < parameters; i++) {
      lua_rawgeti(L, -1, (lua_Integer)i + 2);
      list[i] = (size_t)pgl_integer(L, -1, "parameter", 1, INT64_MAX) - 1;
      lua_pop(L, 1);
    }
    entries[e] = (pg_run_entry){o->descriptor, values, list, parameters};
    lua_pop(L, 1);
  }
  lua_setiuservalue(L, -2, 1);
  return entries;
}

/* core.estimate(ctx, config, compute, run options, entries, diameter) -> bytes by part, total;
 * entries: { { optimizer, index of a parameter, ..., hypers = { } }, ... } */
static int estimate(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const pg_dtype compute = pgl_compute(L, 3);
  const bool diameter = pgl_boolean(L, 6, "diameter");
  pg_model_config config;
  pg_run_options options;
  pg_run_memory need;
  const char *val;
  size_t count;
  luaL_checktype(L, 5, LUA_TTABLE);
  pgl_read_config(L, 2, &config);
  pgl_read_run_options(L, 4, &options, &val);
  const pg_run_entry *entries = read_entries(L, 5, &count);
  ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const int status =
      pg_run_estimate(ctx, &config, compute, &options, entries, count, diameter, &need);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, 0, 10);
  pgl_set_integer(L, "weights", need.weights);
  pgl_set_integer(L, "copies", need.copies);
  pgl_set_integer(L, "gradients", need.gradients);
  pgl_set_integer(L, "slots", need.slots);
  pgl_set_integer(L, "increments", need.increments);
  pgl_set_integer(L, "activations", need.activations);
  pgl_set_integer(L, "logits", need.logits);
  pgl_set_integer(L, "scratch", need.scratch);
  pgl_set_integer(L, "workspace", need.workspace);
  pgl_set_integer(L, "total", need.total);
  return 1;
}

/* core.run_data(ctx, config, run options) -> updates of an epoch; fails where core.run would */
static int run_data(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  pg_model_config config;
  pg_run_options options;
  const char *val;
  int64_t updates;
  lua_settop(L, 3);
  pgl_read_config(L, 2, &config);
  pgl_read_run_options(L, 3, &options, &val);
  const int status = pg_run_data(ctx, &config, &options, &updates);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushinteger(L, updates);
  return 1;
}

static const luaL_Reg functions[] = {{"model_parameters", model_parameters},
                                     {"estimate", estimate},
                                     {"run_data", run_data},
                                     {NULL, NULL}};

void pgl_open_estimate(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
