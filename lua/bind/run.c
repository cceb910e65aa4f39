/* Runs: creation, assignments, the step, progress and checkpoints. Evaluation of a run is in
 * run_eval.c. */
#include "bind.h"
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local pgl_frame *pgl_frames;

static void release_run(pgl_object *o) {
  pgl_run *r = o->resource;
  pgl_model *m = o->parent->resource;
  if (m->run == o) m->run = NULL;
  pg_run_free(r->run);
  for (size_t i = 0; i < r->optimizer_count; i++) pgl_drop(r->optimizers[i]);
  if (r->comm) pgl_drop(r->comm);
  free(r->optimizers);
  free(r->data);
  free(r->val);
  free(r);
}

/* Uservalues: a table from optimizer (its C address) to its userdata, which holds the Lua function;
 * and the model's userdata. They hang on the run, not on the registry, so that a run and a
 * function that refers to it are collected together. */
enum { RUN_OPTIMIZERS = 1, RUN_MODEL = 2 };
const pgl_kind pgl_run_kind = {"perigee.run", "run", 2, release_run};

pgl_object *pgl_check_run(lua_State *L, int arg, const char *method) {
  pgl_object *o = pgl_check(L, arg, &pgl_run_kind);
  if (((pgl_run *)o->resource)->busy)
    luaL_error(L, "run:%s cannot be called from inside run:step", method);
  return o;
}

static pg_run *check_run(lua_State *L, const char *method) {
  return ((pgl_run *)pgl_check_run(L, 1, method)->resource)->run;
}

pgl_object *pgl_read_run_options(lua_State *L, int index, pg_run_options *options,
                                 const char **val) {
  static const char *const keys[] = {"data",      "train",           "val",
                                     "sequences", "micro",           "clip",
                                     "data_seed", "read_ahead",      "keep_increments",
                                     "comm",      "shard_optimizer", "recompute",
                                     "hidden",    "targets",         NULL};
  const char *what = "run", *keep = "head", *recompute = "none";
  int64_t seed = 0, read_ahead = 0;
  pgl_object *comm = NULL;
  *options = (pg_run_options){.max_norm = 1};
  *val = "*_val_*.bin";
  index = lua_absindex(L, index);
  pgl_table(L, index, what, keys);
  /* Hidden states instead of data. What is pushed here stays for the caller to drop. */
  if (pgl_raw(L, index, "hidden")) {
    int64_t count;
    options->hidden = pgl_check_tensor(L, -1)->tensor;
    pgl_need(L, pgl_raw(L, index, "targets"), what, "targets");
    options->targets = pgl_targets(L, lua_gettop(L), &count);
    if (options->hidden->ndim < 1 || options->hidden->shape[0] != count)
      luaL_error(L, "run.targets: %d for hidden states %s", (int)count,
                 pgl_push_shape(L, options->hidden));
    options->sequences = count;
  } else {
    pgl_need(L, pgl_get_string(L, index, what, "data", &options->data), what, "data");
  }
  pgl_get_string(L, index, what, "train", &options->train);
  pgl_get_string(L, index, what, "val", val);
  pgl_need(L,
           pgl_get_integer(L, index, what, "sequences", 1, INT64_MAX, &options->sequences) ||
               options->hidden,
           what, "sequences");
  pgl_get_integer(L, index, what, "micro", 0, INT64_MAX, &options->micro);
  pgl_get_number(L, index, what, "clip", &options->max_norm);
  pgl_get_integer(L, index, what, "data_seed", 0, INT64_MAX, &seed);
  pgl_get_integer(L, index, what, "read_ahead", 0, 1 << 16, &read_ahead);
  pgl_get_string(L, index, what, "keep_increments", &keep);
  if (strcmp(keep, "head") != 0 && strcmp(keep, "all") != 0)
    luaL_error(L, "run.keep_increments: \"head\" or \"all\" expected, got \"%s\"", keep);
  options->data_seed = (uint64_t)seed;
  options->read_ahead = (int)read_ahead;
  options->keep_all_increments = strcmp(keep, "all") == 0;
  pgl_get_boolean(L, index, what, "shard_optimizer", &options->shard_optimizer);
  pgl_get_string(L, index, what, "recompute", &recompute);
  if (strcmp(recompute, "none") != 0 && strcmp(recompute, "block") != 0)
    luaL_error(L, "run.recompute: \"none\" or \"block\" expected, got \"%s\"", recompute);
  options->recompute = strcmp(recompute, "block") == 0;
  if (pgl_raw(L, index, "comm")) {
    comm = pgl_check(L, -1, &pgl_comm_kind);
    options->comm = comm->resource;
    lua_pop(L, 1);
  }
  return comm;
}

/* core.run(model, { data, train, val, sequences, micro, clip, ... }) */
static int run_new(lua_State *L) {
  const char *val;
  pg_run_options options;
  pgl_object *model = pgl_check(L, 1, &pgl_model_kind);
  lua_settop(L, 2);
  pgl_object *comm = pgl_read_run_options(L, 2, &options, &val);

  pgl_model *m = model->resource;
  if (m->run && !m->run->closed) lua_gc(L, LUA_GCCOLLECT); /* it may be garbage */
  pgl_check_open(L, model, "model");
  if (m->run) return luaL_error(L, "this model has a run already; close that one first");

  pgl_object *o = pgl_new(L, &pgl_run_kind, model);
  lua_newtable(L);
  lua_setiuservalue(L, -2, RUN_OPTIMIZERS);
  lua_pushvalue(L, 1);
  lua_setiuservalue(L, -2, RUN_MODEL);
  pgl_run *r = calloc(1, sizeof *r);
  if (!r) return pgl_fail_text(L, PG_ENOMEM, NULL);
  o->resource = r;
  if (comm) {
    pgl_hold(comm);
    r->comm = comm;
  }
  r->data = strdup(options.data ? options.data : "");
  r->val = strdup(val);
  r->micro = options.micro ? options.micro : options.sequences;
  if (!r->data || !r->val) return pgl_fail_text(L, PG_ENOMEM, NULL);
  int status = pg_run_new(m->model, &options, &r->run);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  m->run = o;
  return 1;
}

/* ---- assignments ------------------------------------------------------------------------------
 */
/* Keep `optimizer` (an object) in use by r; false when out of memory. */
static bool keep_optimizer(pgl_run *r, pgl_object *optimizer) {
  for (size_t i = 0; i < r->optimizer_count; i++)
    if (r->optimizers[i] == optimizer) return true;
  pgl_object **more = realloc(r->optimizers, (r->optimizer_count + 1) * sizeof *more);
  if (!more) return false;
  r->optimizers = more;
  more[r->optimizer_count++] = optimizer;
  pgl_hold(optimizer);
  return true;
}

void pgl_push_run_model(lua_State *L, int run) {
  lua_getiuservalue(L, run, RUN_MODEL);
}

int pgl_run_keep(lua_State *L, int run, int arg) {
  pgl_run *r = pgl_check(L, run, &pgl_run_kind)->resource;
  pgl_object *optimizer = pgl_check(L, arg, &pgl_optimizer_kind);
  lua_pushvalue(L, arg);
  lua_getiuservalue(L, run, RUN_OPTIMIZERS);
  lua_insert(L, -2);
  lua_rawsetp(L, -2, optimizer->resource);
  lua_pop(L, 1);
  return keep_optimizer(r, optimizer) ? 0 : PG_ENOMEM;
}

/* run:assign{ optimizer, hypers, independent_decay, cautious, max_norm, parameters } -> index */
static int run_assign(lua_State *L) {
  static const char *const keys[] = {
      "optimizer", "hypers", "independent_decay", "cautious", "max_norm", "parameters", NULL};
  const char *what = "assign";
  bool independent = false, cautious = false;
  double max_norm = HUGE_VAL;
  double values[PG_MAX_HYPERS] = {0};
  pgl_object *o = pgl_check_run(L, 1, "assign");
  lua_settop(L, 2);
  pgl_table(L, 2, what, keys);
  pgl_get_boolean(L, 2, what, "independent_decay", &independent);
  pgl_get_boolean(L, 2, what, "cautious", &cautious);
  pgl_get_number(L, 2, what, "max_norm", &max_norm);
  if (!(max_norm > 0)) return luaL_error(L, "assign.max_norm: above 0 expected, got %f", max_norm);
  pgl_need(L, pgl_raw(L, 2, "optimizer"), what, "optimizer"); /* 3 */
  if (!luaL_testudata(L, 3, pgl_optimizer_kind.type))
    return luaL_error(L, "assign.optimizer: an optimizer expected, got %s", pgl_describe(L, 3));
  pgl_object *optimizer = pgl_check(L, 3, &pgl_optimizer_kind);
  pgl_optimizer *state = optimizer->resource;
  pg_optimizer_defaults(state->descriptor, values);
  if (pgl_raw(L, 2, "hypers")) {
    pgl_read_hypers(L, -1, state->descriptor, values);
    lua_pop(L, 1);
  }
  pgl_need(L, pgl_raw(L, 2, "parameters"), what, "parameters"); /* 4 */
  luaL_checktype(L, 4, LUA_TTABLE);
  const size_t count = (size_t)lua_rawlen(L, 4);
  pg_parameter **list = lua_newuserdatauv(L, sizeof *list * count + 1, 0);
  lua_getiuservalue(L, 1, RUN_OPTIMIZERS);
  lua_pushvalue(L, 3);
  lua_rawsetp(L, -2, state);
  for (size_t i = 0; i < count; i++) {
    lua_rawgeti(L, 4, (lua_Integer)i + 1);
    if (!luaL_testudata(L, -1, PGL_PARAMETER))
      return luaL_error(L, "assign.parameters: entry %I must be a parameter, got %s",
                        (LUAI_UACINT)i + 1, pgl_describe(L, -1));
    pgl_parameter *p = pgl_check_parameter(L, -1);
    if (p->model != o->parent)
      return luaL_error(L, "assign.parameters: %s belongs to another model", p->parameter->name);
    list[i] = p->parameter;
    lua_pop(L, 1);
  }

  o = pgl_check_run(L, 1, "assign");
  pgl_run *r = o->resource;
  int index = 0;
  if (!keep_optimizer(r, optimizer)) return pgl_fail_text(L, PG_ENOMEM, NULL);
  int status = pg_run_assign(r->run, state->descriptor, values, independent, list, count, &index);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  pg_run_assignment(r->run, index)->cautious = cautious;
  pg_run_assignment(r->run, index)->max_norm = max_norm;
  lua_pushinteger(L, index + 1);
  return 1;
}

/* run:set(index, { scale, hypers }) */
static int run_set(lua_State *L) {
  static const char *const keys[] = {"scale", "hypers", NULL};
  pgl_object *o = pgl_check_run(L, 1, "set");
  pg_run *run = ((pgl_run *)o->resource)->run;
  const int64_t index = pgl_integer(L, 2, "index", 1, INT_MAX);
  pg_assignment *a = pg_run_assignment(run, (int)index - 1);
  if (!a) return luaL_error(L, "set: there is no assignment %I", (LUAI_UACINT)index);
  double scale = a->scale, values[PG_MAX_HYPERS];
  lua_settop(L, 3);
  pgl_table(L, 3, "set", keys);
  pgl_get_number(L, 3, "set", "scale", &scale);
  if (!isfinite(scale)) return luaL_error(L, "set.scale: a finite number expected, got %f", scale);
  memcpy(values, a->hypers, sizeof values);
  if (pgl_raw(L, 3, "hypers")) {
    pgl_read_hypers(L, -1, a->optimizer, values);
    int status = pg_optimizer_check(pgl_context(o), a->optimizer, values);
    if (status < 0) return pgl_fail(L, pgl_context(o), status);
  }
  memcpy(a->hypers, values, sizeof values);
  a->scale = scale;
  return 0;
}

static int run_check(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "check");
  int status = pg_run_check(((pgl_run *)o->resource)->run);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

/* ---- the step ---------------------------------------------------------------------------------
 */
void pgl_push_step(lua_State *L, const pg_step *step) {
  char hash[20];
  snprintf(hash, sizeof hash, "%016" PRIx64, step->batch_hash);
  lua_createtable(L, 0, 8);
  pgl_set_number(L, "loss", step->loss);
  pgl_set_number(L, "norm", step->norm);
  pgl_set_number(L, "factor", step->factor);
  pgl_set_integer(L, "update", step->update);
  pgl_set_integer(L, "tokens", step->tokens);
  pgl_set_string(L, "batch_hash", hash);
  pgl_set_number(L, "seconds", step->seconds);
  pgl_set_number(L, "wait_seconds", step->wait_seconds);
}

void pgl_frame_begin(lua_State *L, pgl_frame *frame, pgl_object *run) {
  *frame = (pgl_frame){.L = L, .run = run, .previous = pgl_frames};
  pgl_frames = frame;
  ((pgl_run *)run->resource)->busy = true;
  pgl_hold(run);
}

/* Closing the run in there takes effect now. */
bool pgl_frame_end(lua_State *L, pgl_frame *frame, int status) {
  char message[sizeof((struct pg_context *)0)->message] = "";
  pgl_frames = frame->previous;
  ((pgl_run *)frame->run->resource)->busy = false;
  if (status < 0)
    snprintf(message, sizeof message, "%s", pg_context_message(pgl_context(frame->run)));
  else if (frame->hosted)
    pgl_tensors_end(L, pgl_context(frame->run));
  pgl_drop(frame->run);
  lua_settop(L, PGL_FRAME_ERROR);
  if (frame->failed) lua_error(L);
  if (status < 0) pgl_fail_text(L, status, message);
  return status >= 0;
}

/* run:step(). Optimizers written in Lua are called inside pg_run_step, on this stack. */
static int run_step(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "step");
  pgl_frame frame;
  pg_step step;
  lua_settop(L, 1);
  lua_getiuservalue(L, 1, RUN_MODEL);
  lua_pushnil(L); /* PGL_FRAME_ERROR */
  pgl_frame_begin(L, &frame, o);
  if (!pgl_frame_end(L, &frame, pg_run_step(((pgl_run *)o->resource)->run, &step))) return 3;
  pgl_push_step(L, &step);
  return 1;
}

/* run:alone(boolean): from here on, or no longer, only this rank of several runs Lua */
static int run_alone(lua_State *L) {
  ((pgl_run *)pgl_check_run(L, 1, "alone")->resource)->alone = pgl_boolean(L, 2, "alone");
  return 0;
}

static int run_updates(lua_State *L) {
  lua_pushinteger(L, pg_run_updates(((pgl_run *)pgl_check(L, 1, &pgl_run_kind)->resource)->run));
  return 1;
}

static int run_tokens(lua_State *L) {
  lua_pushinteger(L, pg_run_tokens(((pgl_run *)pgl_check(L, 1, &pgl_run_kind)->resource)->run));
  return 1;
}

static int run_set_progress(lua_State *L) {
  pg_run *run = check_run(L, "set_progress");
  int64_t updates = pgl_integer(L, 2, "updates", 0, INT64_MAX);
  pg_run_set_progress(run, updates, pgl_integer(L, 3, "tokens", 0, INT64_MAX));
  return 0;
}

static int run_loader(lua_State *L) {
  pg_loader *loader = pg_run_loader(((pgl_run *)pgl_check(L, 1, &pgl_run_kind)->resource)->run);
  pg_loader_state state;
  if (!loader) return luaL_error(L, "loader: this run is on given hidden states");
  pg_loader_get_state(loader, &state);
  lua_createtable(L, 0, 7);
  pgl_set_integer(L, "epoch", state.epoch);
  pgl_set_integer(L, "shard_position", state.shard_position);
  pgl_set_integer(L, "batch_position", state.batch_position);
  pgl_set_integer(L, "batches", state.batches);
  pgl_set_integer(L, "updates_per_epoch", pg_loader_batches(loader));
  pgl_set_integer(L, "shards", (int64_t)pg_loader_shards(loader)->count);
  pgl_set_number(L, "wait_seconds", pg_loader_wait_seconds(loader));
  return 1;
}

/* ---- checkpoints -------------------------------------------------------------------------------
 */
/* run:save(path, { tokenizer, host_state, tensors = { {name, tensor}, ... } }) */
static int run_save(lua_State *L) {
  static const char *const keys[] = {"tokenizer", "host_state", "tensors", NULL};
  pg_checkpoint_options options = {0};
  pgl_object *o = pgl_check_run(L, 1, "save");
  const char *path = pgl_string(L, 2, "path");
  lua_settop(L, 3);
  if (!lua_isnil(L, 3)) {
    pgl_table(L, 3, "save", keys);
    pgl_get_string(L, 3, "save", "tokenizer", &options.tokenizer);
    pgl_get_string(L, 3, "save", "host_state", &options.host_state);
    if (pgl_raw(L, 3, "tensors"))
      options.tensors = pgl_named_tensors(L, lua_gettop(L), "save.tensors", &options.tensor_count);
    pgl_check_run(L, 1, "save");
  }
  int status = pg_checkpoint_save(((pgl_run *)o->resource)->run, path, &options);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

/* The table { embedding = "keep"|"reset", ... } in options.slots at `index`. */
static void read_policies(lua_State *L, int index, pg_checkpoint_load_options *options) {
  static const char *const keys[] = {"embedding", "backbone", "head", NULL};
  if (!pgl_raw(L, index, "slots")) return;
  pgl_table(L, -1, "load.slots", keys);
  for (int r = 0; r < PG_ROLES; r++) {
    const char *policy = "keep";
    pgl_get_string(L, -1, "load.slots", keys[r], &policy);
    if (strcmp(policy, "reset") == 0)
      options->slots[r] = PG_SLOTS_RESET;
    else if (strcmp(policy, "keep") != 0)
      luaL_error(L, "load.slots.%s: \"keep\" or \"reset\" expected, got \"%s\"", keys[r], policy);
  }
  lua_pop(L, 1);
}

/* run:load(path, nil | { slots, restart_data }) -> host_state as JSON text */
static int run_load(lua_State *L) {
  static const char *const keys[] = {"slots", "restart_data", NULL};
  pg_checkpoint_load_options options = {.slots = {PG_SLOTS_KEEP, PG_SLOTS_KEEP, PG_SLOTS_KEEP}};
  char *host_state = NULL;
  pgl_check_run(L, 1, "load");
  const char *path = pgl_string(L, 2, "path");
  lua_settop(L, 3);
  if (!lua_isnil(L, 3)) {
    pgl_table(L, 3, "load", keys);
    read_policies(L, 3, &options);
    pgl_get_boolean(L, 3, "load", "restart_data", &options.restart_data);
  }
  void **box = pgl_own(L, free);
  pgl_object *o = pgl_check_run(L, 1, "load");
  int status = pg_checkpoint_load(((pgl_run *)o->resource)->run, path,
                                  lua_isnil(L, 3) ? NULL : &options, &host_state);
  *box = host_state;
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushstring(L, host_state ? host_state : "null");
  pgl_disown(box);
  return 1;
}

/* core.checkpoint_verify(ctx, path, hashes) */
static int checkpoint_verify(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const char *path = pgl_string(L, 2, "path");
  int status = pg_checkpoint_verify(ctx, path, lua_toboolean(L, 3));
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushboolean(L, true);
  return 1;
}

/* core.checkpoint_config(ctx, path) */
static int checkpoint_config(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  pg_model_config config;
  int status = pg_checkpoint_config(ctx, pgl_string(L, 2, "path"), &config);
  if (status < 0) return pgl_fail(L, ctx, status);
  pgl_push_config(L, &config);
  return 1;
}

static const luaL_Reg methods[] = {{"assign", run_assign},
                                   {"set", run_set},
                                   {"check", run_check},
                                   {"step", run_step},
                                   {"gradients", pgl_run_gradients},
                                   {"rewind", pgl_run_rewind},
                                   {"trial", pgl_run_trial},
                                   {"save", run_save},
                                   {"load", run_load},
                                   {"alone", run_alone},
                                   {"updates", run_updates},
                                   {"tokens", run_tokens},
                                   {"set_progress", run_set_progress},
                                   {"loader", run_loader},
                                   {"validate", pgl_run_validate},
                                   {"hilbert", pgl_run_hilbert},
                                   {"functional", pgl_run_functional},
                                   {"functional_from", pgl_run_functional_from},
                                   {"bottleneck", pgl_run_bottleneck},
                                   {"prediction", pgl_run_prediction},
                                   {"measure_noise", pgl_run_measure_noise},
                                   {"noise", pgl_run_noise},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"run", run_new},
                                     {"checkpoint_verify", checkpoint_verify},
                                     {"checkpoint_config", checkpoint_config},
                                     {NULL, NULL}};

void pgl_open_run(lua_State *L) {
  pgl_define(L, &pgl_run_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
