/* The functional size of a change of the head (core/functional.h): what
 * lua/perigee/geometry/functional.lua makes results of. Token ids count from 0, as in the core. */
#include "bind.h"
#include <math.h>

#define COLUMN(name) #name, offsetof(pg_change, name)
static const pgl_column numbers[] = {
    {COLUMN(range)},          {COLUMN(kl)},         {COLUMN(tv)},
    {COLUMN(aitchison)},      {COLUMN(fisher_rao)}, {COLUMN(entropy)},
    {COLUMN(entropy_change)}, {COLUMN(loss)},       {COLUMN(loss_change)},
    {COLUMN(gradient_cosine)}};
static const pgl_column backward[] = {
    {COLUMN(backward)},
    {COLUMN(rows)},
    {COLUMN(rows_bound)},
    {COLUMN(flow)},
    {COLUMN(flow_bound)},
    {"bound_before", offsetof(pg_change, backward_bound)},
    {"bound_after", offsetof(pg_change, backward_bound) + sizeof(double)}};
static const pgl_column tokens[] = {{COLUMN(target)}, {COLUMN(high)}, {COLUMN(low)}};

void pgl_set_columns(lua_State *L, const void *items, size_t size, int64_t count,
                     const pgl_column *columns, size_t n, bool whole) {
  for (size_t c = 0; c < n; c++) {
    const char *at = (const char *)items + columns[c].offset;
    lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
    for (int64_t i = 0; i < count; i++, at += size) {
      if (whole)
        lua_pushinteger(L, *(const int64_t *)(const void *)at);
      else
        lua_pushnumber(L, *(const double *)(const void *)at);
      lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, columns[c].name);
  }
}

static void set_columns(lua_State *L, const pg_change *changes, int64_t count,
                        const pgl_column *columns, size_t n, bool whole) {
  pgl_set_columns(L, changes, sizeof *changes, count, columns, n, whole);
}

static int push_result(lua_State *L, const pg_functional *sizes, const pg_change *changes,
                       int64_t count, bool with_backward) {
  lua_newtable(L);
  set_columns(L, changes, count, numbers, PG_COUNT(numbers), false);
  set_columns(L, changes, count, tokens, PG_COUNT(tokens), true);
  if (with_backward) {
    set_columns(L, changes, count, backward, PG_COUNT(backward), false);
    pgl_set_number(L, "before_diameter", sizes->before_diameter);
    pgl_set_number(L, "after_diameter", sizes->after_diameter);
  }
  if (!isnan(sizes->diameter)) pgl_set_number(L, "diameter", sizes->diameter);
  pgl_set_number(L, "seconds", sizes->seconds);
  return 1;
}

/* The options table at `index`, nil for none. */
static pg_functional_options read_options(lua_State *L, int index) {
  static const char *const keys[] = {"before", "backward", NULL};
  pg_functional_options o = {0};
  if (lua_isnoneornil(L, index)) return o;
  pgl_table(L, index, "functional options", keys);
  pgl_get_boolean(L, index, "functional options", "before", &o.before);
  pgl_get_boolean(L, index, "functional options", "backward", &o.backward);
  return o;
}

static pg_change *new_changes(lua_State *L, int64_t count) {
  return lua_newuserdatauv(L, sizeof(pg_change) * (size_t)pg__max(1, count), 0);
}

/* run:functional(panel, matrix [, options]): over all ranks */
int pgl_run_functional(lua_State *L) {
  pgl_check_run(L, 1, "functional");
  lua_settop(L, 4);
  pg_functional_options o = read_options(L, 4);
  const int64_t count = pg_panel_tokens(pgl_check(L, 2, &pgl_panel_kind)->resource);
  pg_change *changes = new_changes(L, count);
  pgl_run *r = pgl_check_run(L, 1, "functional")->resource;
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  const pg_model *model = pg_run_model(r->run);
  pg_functional sizes;
  o.comm = pg_run_comm(r->run);
  int status = pg_functional_change(model, pg_run_activations(r->run), panel,
                                    pgl_check_tensor(L, 3)->tensor, &o, &sizes, changes);
  if (status < 0) return pgl_fail(L, pg_model_context(model), status);
  return push_result(L, &sizes, changes, count, o.backward);
}

/* run:functional_from(model, panel [, options]): from that model to the run's, over all ranks */
int pgl_run_functional_from(lua_State *L) {
  pgl_check_run(L, 1, "functional_from");
  lua_settop(L, 4);
  pg_functional_options o = read_options(L, 4);
  const int64_t count = pg_panel_tokens(pgl_check(L, 3, &pgl_panel_kind)->resource);
  pg_change *changes = new_changes(L, count);
  pgl_evaluation e;
  const int results = pgl_evaluate(L, 2, 4, &e);
  if (results > 0) return results;
  pgl_run *r = pgl_check_run(L, 1, "functional_from")->resource;
  const pg_panel *panel = pgl_check(L, 3, &pgl_panel_kind)->resource;
  pg_functional sizes;
  o.comm = pg_run_comm(r->run);
  int status = pg_functional_between(e.model, e.activations, pg_run_model(r->run),
                                     pg_run_activations(r->run), panel, &o, &sizes, changes);
  if (status < 0) return pgl_fail(L, pg_model_context(pg_run_model(r->run)), status);
  pgl_disown(e.box);
  return push_result(L, &sizes, changes, count, o.backward);
}

/* core.functional(model, panel, matrix [, { before, backward }]) -> lists of every number of
 * pg_change, and diameter, seconds */
static int functional(lua_State *L) {
  lua_settop(L, 4);
  const pg_functional_options o = read_options(L, 4);
  const int64_t count = pg_panel_tokens(pgl_check(L, 2, &pgl_panel_kind)->resource);
  pg_change *changes = new_changes(L, count);
  pgl_evaluation e;
  const int results = pgl_evaluate(L, 1, 4, &e);
  if (results > 0) return results;
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  pg_functional sizes;
  int status = pg_functional_change(e.model, e.activations, panel, pgl_check_tensor(L, 3)->tensor,
                                    &o, &sizes, changes);
  if (status < 0) return pgl_fail(L, pg_model_context(e.model), status);
  pgl_disown(e.box);
  return push_result(L, &sizes, changes, count, o.backward);
}

/* core.functional_between(from, to, panel [, { backward }]) -> the same */
static int functional_between(lua_State *L) {
  lua_settop(L, 4);
  const pg_functional_options o = read_options(L, 4);
  const int64_t count = pg_panel_tokens(pgl_check(L, 3, &pgl_panel_kind)->resource);
  pg_change *changes = new_changes(L, count);
  pgl_evaluation e[2];
  const int results = pgl_evaluate_both(L, e);
  if (results > 0) return results;
  const pg_panel *panel = pgl_check(L, 3, &pgl_panel_kind)->resource;
  pg_functional sizes;
  int status = pg_functional_between(e[0].model, e[0].activations, e[1].model, e[1].activations,
                                     panel, &o, &sizes, changes);
  if (status < 0) return pgl_fail(L, pg_model_context(e[1].model), status);
  for (int i = 0; i < 2; i++) pgl_disown(e[i].box);
  return push_result(L, &sizes, changes, count, o.backward);
}

const int32_t *pgl_targets(lua_State *L, int arg, int64_t *count) {
  luaL_checktype(L, arg, LUA_TTABLE);
  *count = (int64_t)lua_rawlen(L, arg);
  int32_t *targets = lua_newuserdatauv(L, sizeof(int32_t) * (size_t)pg__max(1, *count), 0);
  for (int64_t i = 0; i < *count; i++) {
    lua_rawgeti(L, arg, i + 1);
    targets[i] = (int32_t)pgl_integer(L, -1, "target", 0, INT32_MAX);
    lua_pop(L, 1);
  }
  return targets;
}

void pgl_check_states(lua_State *L, const char *what, const pgl_tensor *hidden, int64_t count) {
  if (hidden->tensor->ndim < 1 || hidden->tensor->shape[0] != count)
    luaL_error(L, "%s: %d targets for hidden states %s", what, (int)count,
               pgl_push_shape(L, hidden->tensor));
}

/* core.functional_states(head, matrix, hidden, targets, scale [, { before, backward }]) */
static int functional_states(lua_State *L) {
  lua_settop(L, 6);
  const double scale = pgl_number(L, 5, "scale");
  const pg_functional_options o = read_options(L, 6);
  int64_t count;
  const int32_t *targets = pgl_targets(L, 4, &count);
  pg_change *changes = new_changes(L, count);
  const pgl_tensor *head = pgl_check_tensor(L, 1), *matrix = pgl_check_tensor(L, 2),
                   *hidden = pgl_check_tensor(L, 3);
  pgl_check_states(L, "functional_states", hidden, count);
  pg_functional sizes;
  int status = pg_functional_states(head->tensor, matrix->tensor, hidden->tensor, targets, scale,
                                    &o, &sizes, changes);
  if (status < 0) return pgl_fail(L, pgl_context(head->context), status);
  return push_result(L, &sizes, changes, count, o.backward);
}

static const luaL_Reg functions[] = {{"functional", functional},
                                     {"functional_between", functional_between},
                                     {"functional_states", functional_states},
                                     {NULL, NULL}};

void pgl_open_functional(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
