/* Trials: what another optimizer would do to a parameter of a run, from the run's gradients. */
#include "bind.h"
#include <math.h>
#include <string.h>

static void release_trial(pgl_object *o) {
  pg_trial_free(o->resource);
}

/* The uservalue is the run's userdata. */
const pgl_kind pgl_trial_kind = {"perigee.trial", "trial", 1, release_trial};

/* run:gradients() -> as run:step, of the next optimizer batch, with nothing applied. The data
 * position advances: run:loader() before it and run:rewind() after it go back. */
int pgl_run_gradients(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "gradients");
  pg_step step;
  int status = pg_run_gradients(((pgl_run *)o->resource)->run, &step);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  pgl_push_step(L, &step);
  return 1;
}

/* run:rewind(position): to a data position that run:loader() gave */
int pgl_run_rewind(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "rewind");
  pg_run *run = ((pgl_run *)o->resource)->run;
  pg_loader_state state;
  int64_t value = 0;
  luaL_checktype(L, 2, LUA_TTABLE);
  if (!pg_run_loader(run)) return luaL_error(L, "rewind: this run is on given hidden states");
  pg_loader_get_state(pg_run_loader(run), &state);
  const struct {
    const char *key;
    int64_t *field;
  } fields[] = {{"epoch", &state.epoch},
                {"shard_position", &state.shard_position},
                {"batch_position", &state.batch_position},
                {"batches", &state.batches}};
  for (size_t i = 0; i < PG_COUNT(fields); i++) {
    pgl_need(L, pgl_get_integer(L, 2, "rewind", fields[i].key, 0, INT64_MAX, &value), "rewind",
             fields[i].key);
    *fields[i].field = value;
  }
  int status = pg_run_rewind(run, &state);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

/* run:trial(parameter, { optimizer, hypers, inherit }) -> trial */
int pgl_run_trial(lua_State *L) {
  static const char *const keys[] = {"optimizer", "hypers", "inherit", NULL};
  double values[PG_MAX_HYPERS] = {0};
  bool inherit = false;
  pgl_object *o = pgl_check_run(L, 1, "trial");
  pgl_parameter *p = pgl_check_parameter(L, 2);
  lua_settop(L, 3);
  pgl_table(L, 3, "trial", keys);
  pgl_get_boolean(L, 3, "trial", "inherit", &inherit);
  pgl_need(L, pgl_raw(L, 3, "optimizer"), "trial", "optimizer"); /* 4 */
  const pg_optimizer *optimizer =
      ((pgl_optimizer *)pgl_check(L, 4, &pgl_optimizer_kind)->resource)->descriptor;
  pg_optimizer_defaults(optimizer, values);
  if (pgl_raw(L, 3, "hypers")) {
    pgl_read_hypers(L, -1, optimizer, values);
    lua_pop(L, 1);
  }
  if (p->model != o->parent)
    return luaL_error(L, "trial: %s belongs to another model", p->parameter->name);
  int status = pgl_run_keep(L, 1, 4);
  if (status < 0) return pgl_fail_text(L, status, NULL);
  pgl_object *trial = pgl_new(L, &pgl_trial_kind, o); /* 5 */
  lua_pushvalue(L, 1);
  lua_setiuservalue(L, 5, 1);
  pgl_check_run(L, 1, "trial");
  pg_trial *made = NULL;
  status =
      pg_trial_new(((pgl_run *)o->resource)->run, p->parameter, optimizer, values, inherit, &made);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  trial->resource = made;
  return 1;
}

/* trial:increment(scale [, hypers]): one more update from the gradients that the run holds now,
 * from then on with these hyperparameters */
static int trial_increment(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &pgl_trial_kind);
  const double scale = pgl_number(L, 2, "scale");
  pgl_frame frame;
  if (!isfinite(scale)) return luaL_error(L, "increment: a finite scale expected, got %f", scale);
  if (!lua_isnoneornil(L, 3)) {
    double values[PG_MAX_HYPERS];
    memcpy(values, pg_trial_hypers(o->resource), sizeof values);
    pgl_read_hypers(L, 3, pg_trial_optimizer(o->resource), values);
    int status = pg_optimizer_check(pgl_context(o), pg_trial_optimizer(o->resource), values);
    if (status < 0) return pgl_fail(L, pgl_context(o), status);
    memcpy(pg_trial_hypers(o->resource), values, sizeof values);
  }
  lua_settop(L, 1);
  lua_getiuservalue(L, 1, 1);
  pgl_object *run = pgl_check_run(L, 2, "trial");
  lua_remove(L, 1); /* the run keeps what is needed */
  pgl_push_run_model(L, 1);
  lua_pushnil(L); /* PGL_FRAME_ERROR */
  pgl_hold(o);
  pgl_frame_begin(L, &frame, run);
  int status = pg_trial_increment(o->resource, scale);
  pgl_drop(o);
  if (!pgl_frame_end(L, &frame, status)) return 3;
  lua_pushboolean(L, true);
  return 1;
}

/* trial:value() -> a copy of the last increment */
static int trial_value(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &pgl_trial_kind);
  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check(L, 1, &pgl_trial_kind);
  pgl_tensor_bind(t, pgl_root(o), NULL);
  int status = pg_tensor_clone(pg_trial_value(o->resource), &t->tensor);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  pgl_tensor_made(L, t);
  return 1;
}

static void push_clone(lua_State *L, pgl_object *o, const pg_tensor *t) {
  pgl_tensor *copy = pgl_push_tensor(L);
  pgl_tensor_bind(copy, pgl_root(o), NULL);
  if (pg_tensor_clone(t, &copy->tensor) < 0)
    luaL_error(L, "%s", pg_context_message(pgl_context(o)));
  pgl_tensor_made(L, copy);
}

/* trial:state() -> updates, { increment = , slot = , ... }: copies */
static int trial_state(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &pgl_trial_kind);
  const pg_optimizer *optimizer = pg_trial_optimizer(o->resource);
  lua_pushinteger(L, pg_trial_updates(o->resource));
  lua_newtable(L);
  push_clone(L, o, pg_trial_value(o->resource));
  lua_setfield(L, -2, "increment");
  for (size_t s = 0; s < optimizer->slot_count; s++) {
    lua_pushfstring(L, "slot.%s", optimizer->slots[s].name);
    push_clone(L, o, pg_trial_slot(o->resource, s));
    lua_settable(L, -3);
  }
  return 2;
}

/* trial:resume(updates, { increment = , slot = , ... }) */
static int trial_resume(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &pgl_trial_kind);
  const int64_t updates = pgl_integer(L, 2, "updates", 0, INT64_MAX);
  const pg_optimizer *optimizer = pg_trial_optimizer(o->resource);
  const pg_tensor *slots[PG_MAX_SLOTS] = {NULL};
  luaL_checktype(L, 3, LUA_TTABLE);
  lua_settop(L, 3);
  lua_getfield(L, 3, "increment");
  const pg_tensor *increment = pgl_check_tensor(L, -1)->tensor;
  for (size_t s = 0; s < optimizer->slot_count; s++) {
    lua_pushfstring(L, "slot.%s", optimizer->slots[s].name);
    lua_gettable(L, 3);
    slots[s] = pgl_check_tensor(L, -1)->tensor;
  }
  int status = pg_trial_resume(o->resource, updates, increment, slots);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg methods[] = {{"increment", trial_increment},
                                   {"value", trial_value},
                                   {"state", trial_state},
                                   {"resume", trial_resume},
                                   {NULL, NULL}};

void pgl_open_trial(lua_State *L) {
  pgl_define(L, &pgl_trial_kind, methods);
}
