/* The gradient bottleneck of a head (core/bottleneck.h): what lua/perigee/geometry/bottleneck.lua
 * makes results of. Token ids count from 0, as in the core. */
#include "bind.h"

static int push_result(lua_State *L, const pg_bottleneck *b, const pg_kept *kept, int64_t count) {
  lua_createtable(L, 0, 9);
  pgl_set_integer(L, "rank", b->rank);
  pgl_set_integer(L, "classes", b->classes);
  pgl_set_number(L, "baseline", b->baseline);
  pgl_set_number(L, "condition", b->condition);
  pgl_set_number(L, "seconds", b->seconds);
  static const char *const names[] = {"kept", "norm", "loss", "target"};
  for (size_t c = 0; c < PG_COUNT(names); c++) {
    lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
    for (int64_t i = 0; i < count; i++) {
      if (c == 3)
        lua_pushinteger(L, kept[i].target);
      else
        lua_pushnumber(L, c == 0 ? kept[i].kept : c == 1 ? kept[i].norm : kept[i].loss);
      lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, names[c]);
  }
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
  pgl_object *object = pgl_check(L, 1, &pgl_model_kind);
  const pg_model *model = ((pgl_model *)object->resource)->model;
  pg_activations *a = NULL;
  void **box;
  int status = pgl_evaluation(L, model, 4, &a, &box);
  pgl_check(L, 1, &pgl_model_kind); /* making the box may collect */
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  pg_bottleneck b;
  if (status == 0) status = pg_bottleneck_panel(model, a, panel, NULL, &b, kept);
  if (status < 0) return pgl_fail(L, pg_model_context(model), status);
  pgl_disown(box);
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
  if (hidden->tensor->ndim < 1 || hidden->tensor->shape[0] != count)
    return luaL_error(L, "bottleneck: %d targets for hidden states %s", (int)count,
                      pgl_push_shape(L, hidden->tensor));
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
