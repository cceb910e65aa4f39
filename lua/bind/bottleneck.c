/* The gradient bottleneck of a head (core/bottleneck.h): what lua/perigee/geometry/bottleneck.lua
 * makes results of. Token ids count from 0, as in the core. */
#include "bind.h"

#define COLUMN(name) #name, offsetof(pg_kept, name)
static const pgl_column numbers[] = {{COLUMN(kept)}, {COLUMN(norm)}, {COLUMN(loss)}};
static const pgl_column tokens[] = {{COLUMN(target)}};

static int push_result(lua_State *L, const pg_bottleneck *b, const pg_kept *kept, int64_t count) {
  lua_createtable(L, 0, 9);
  pgl_set_integer(L, "rank", b->rank);
  pgl_set_integer(L, "classes", b->classes);
  pgl_set_number(L, "baseline", b->baseline);
  pgl_set_number(L, "condition", b->condition);
  pgl_set_number(L, "seconds", b->seconds);
  pgl_set_columns(L, kept, sizeof *kept, count, numbers, PG_COUNT(numbers), false);
  pgl_set_columns(L, kept, sizeof *kept, count, tokens, PG_COUNT(tokens), true);
  return 1;
}

static pg_kept *new_positions(lua_State *L, int64_t count) {
  return lua_newuserdatauv(L, sizeof(pg_kept) * (size_t)pg__max(1, count), 0);
}

/* run:bottleneck(panel): over all ranks */
int pgl_run_bottleneck(lua_State *L) {
  pgl_check_run(L, 1, "bottleneck");
  lua_settop(L, 2);
  const int64_t count = pg_panel_tokens(pgl_check(L, 2, &pgl_panel_kind)->resource);
  pg_kept *kept = new_positions(L, count);
  pgl_run *r = pgl_check_run(L, 1, "bottleneck")->resource;
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  const pg_model *model = pg_run_model(r->run);
  pg_bottleneck b;
  int status =
      pg_bottleneck_panel(model, pg_run_activations(r->run), panel, pg_run_comm(r->run), &b, kept);
  if (status < 0) return pgl_fail(L, pg_model_context(model), status);
  return push_result(L, &b, kept, count);
}

/* core.bottleneck(model, panel) -> { rank, classes, baseline, condition, seconds } and the lists
 * kept, norm, loss, target */
static int bottleneck(lua_State *L) {
  lua_settop(L, 2);
  const int64_t count = pg_panel_tokens(pgl_check(L, 2, &pgl_panel_kind)->resource);
  pg_kept *kept = new_positions(L, count);
  pgl_evaluation e;
  const int results = pgl_evaluate(L, 1, 4, &e);
  if (results > 0) return results;
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  pg_bottleneck b;
  int status = pg_bottleneck_panel(e.model, e.activations, panel, NULL, &b, kept);
  if (status < 0) return pgl_fail(L, pg_model_context(e.model), status);
  pgl_disown(e.box);
  return push_result(L, &b, kept, count);
}

/* core.bottleneck_states(head, hidden, targets, scale) -> the same; targets a list of ids */
static int bottleneck_states(lua_State *L) {
  lua_settop(L, 4);
  const double scale = pgl_number(L, 4, "scale");
  int64_t count;
  const int32_t *targets = pgl_targets(L, 3, &count);
  pg_kept *kept = new_positions(L, count);
  const pgl_tensor *head = pgl_check_tensor(L, 1), *hidden = pgl_check_tensor(L, 2);
  pgl_check_states(L, "bottleneck", hidden, count);
  pg_bottleneck b;
  int status = pg_bottleneck_states(head->tensor, hidden->tensor, targets, scale, &b, kept);
  if (status < 0) return pgl_fail(L, pgl_context(head->context), status);
  return push_result(L, &b, kept, count);
}

/* core.bottleneck_gradient(head, gradient) -> ||Pi G|| / ||G|| */
static int bottleneck_gradient(lua_State *L) {
  const pgl_tensor *head = pgl_check_tensor(L, 1), *gradient = pgl_check_tensor(L, 2);
  double kept;
  int status = pg_bottleneck_gradient(head->tensor, gradient->tensor, &kept);
  if (status < 0) return pgl_fail(L, pgl_context(head->context), status);
  lua_pushnumber(L, kept);
  return 1;
}

static const luaL_Reg functions[] = {{"bottleneck", bottleneck},
                                     {"bottleneck_states", bottleneck_states},
                                     {"bottleneck_gradient", bottleneck_gradient},
                                     {NULL, NULL}};

void pgl_open_bottleneck(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
