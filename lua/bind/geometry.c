/* Diagnostics: panels, Hilbert RMS and validation, for a run or for a model. */
#include "bind.h"
#include <time.h>

static void release_panel(pgl_object *o) {
  pg_panel_free(o->resource);
}

const pgl_kind pgl_panel_kind = {"perigee.panel", "panel", 0, release_panel};

/* ---- panels ------------------------------------------------------------------------------------
 */
static int panel_hash(lua_State *L) {
  lua_pushstring(L, pg_panel_hash(pgl_check(L, 1, &pgl_panel_kind)->resource));
  return 1;
}

static int panel_tostring(lua_State *L) {
  const pgl_object *o = *(pgl_object **)luaL_checkudata(L, 1, pgl_panel_kind.type);
  if (!o || o->closed || !o->resource)
    lua_pushliteral(L, "panel (closed)");
  else
    lua_pushfstring(L, "panel %s of %I positions", pg_panel_hash(o->resource),
                    (LUAI_UACINT)pg_panel_tokens(o->resource));
  return 1;
}

static int panel_tokens(lua_State *L) {
  lua_pushinteger(L, pg_panel_tokens(pgl_check(L, 1, &pgl_panel_kind)->resource));
  return 1;
}

/* panel:context(i [, n]) -> the up to n (default 16) ids of its sequence that end with position i,
 * counted from 1, and the id after them. */
static int panel_context(lua_State *L) {
  const pg_panel *panel = pgl_check(L, 1, &pgl_panel_kind)->resource;
  const int64_t i = pgl_integer(L, 2, "position", 1, pg_panel_tokens(panel)) - 1;
  const int64_t n = lua_isnoneornil(L, 3) ? 16 : pgl_integer(L, 3, "n", 1, INT64_MAX);
  const int32_t *ids;
  int32_t target;
  const int64_t count = pg_panel_context(panel, i, n, &ids, &target);
  lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
  for (int64_t k = 0; k < count; k++) {
    lua_pushinteger(L, ids[k]);
    lua_rawseti(L, -2, k + 1);
  }
  lua_pushinteger(L, target);
  return 2;
}

/* panel:lengths() -> the number of positions of each of its sequences, in order */
static int panel_lengths(lua_State *L) {
  const pg_panel *panel = pgl_check(L, 1, &pgl_panel_kind)->resource;
  lua_newtable(L);
  for (size_t k = 0; k < pg_panel_sequences(panel); k++) {
    lua_pushinteger(L, pg_panel_length(panel, k));
    lua_rawseti(L, -2, (lua_Integer)k + 1);
  }
  return 1;
}

/* core.panel(ctx, { data, val, time, vocab, tokens, ranks, micro, spread }) */
static int panel_new(lua_State *L) {
  static const char *const keys[] = {"data",  "val",   "time",   "vocab", "tokens",
                                     "ranks", "micro", "spread", NULL};
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *data = NULL, *val = "*_val_*.bin";
  int64_t time = 0, vocab = 0;
  pg_panel_options options = {0};
  lua_settop(L, 2);
  pgl_table(L, 2, "panel", keys);
  pgl_need(L, pgl_get_integer(L, 2, "panel", "tokens", 1, INT64_MAX, &options.tokens), "panel",
           "tokens");
  pgl_get_integer(L, 2, "panel", "ranks", 1, INT64_MAX, &options.ranks);
  pgl_get_integer(L, 2, "panel", "micro", 1, INT64_MAX, &options.micro);
  pgl_get_boolean(L, 2, "panel", "spread", &options.spread);
  pgl_need(L, pgl_get_string(L, 2, "panel", "data", &data), "panel", "data");
  pgl_get_string(L, 2, "panel", "val", &val);
  pgl_need(L, pgl_get_integer(L, 2, "panel", "time", 1, INT64_MAX, &time), "panel", "time");
  pgl_need(L, pgl_get_integer(L, 2, "panel", "vocab", 2, INT64_MAX, &vocab), "panel", "vocab");
  pgl_object *o = pgl_new(L, &pgl_panel_kind, context);
  pg_panel *panel = NULL;
  int status = pg_panel_new(context->resource, data, val, time, vocab, &options, &panel);
  if (status < 0) return pgl_fail(L, context->resource, status);
  o->resource = panel;
  return 1;
}

/* ---- Hilbert RMS
 * --------------------------------------------------------------------------------- */
static void push_numbers(lua_State *L, const float *values, int64_t count) {
  lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
  for (int64_t i = 0; i < count; i++) {
    lua_pushnumber(L, values[i]);
    lua_rawseti(L, -2, i + 1);
  }
}

/* Evaluate and push rms and, when asked for, the list of ranges. */
static int push_hilbert(lua_State *L, const pg_model *model, pg_activations *a,
                        const pg_panel *panel, const pg_tensor *matrix, pg_comm *comm,
                        float *ranges) {
  double rms = 0;
  int status = pg_hilbert_shared(model, a, panel, matrix, comm, &rms, ranges);
  if (status < 0) return pgl_fail(L, pg_model_context(model), status);
  lua_pushnumber(L, rms);
  if (!ranges) return 1;
  push_numbers(L, ranges, pg_panel_tokens(panel));
  return 2;
}

/* A host buffer for the ranges when the argument after `arg` asks for them; NULL otherwise. */
static float *want_ranges(lua_State *L, int arg, const pg_panel *panel) {
  if (lua_isnoneornil(L, arg) || !pgl_boolean(L, arg, "ranges")) return NULL;
  return lua_newuserdatauv(L, sizeof(float) * (size_t)pg_panel_tokens(panel), 0);
}

/* run:hilbert(panel [, matrix [, ranges]]): the head's increment unless a matrix is given. */
int pgl_run_hilbert(lua_State *L) {
  pgl_check_run(L, 1, "hilbert");
  lua_settop(L, 4);
  float *ranges = want_ranges(L, 4, pgl_check(L, 2, &pgl_panel_kind)->resource);
  pgl_run *r = pgl_check_run(L, 1, "hilbert")->resource;
  pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  const pg_model *model = pg_run_model(r->run);
  const pg_tensor *matrix =
      lua_isnil(L, 3) ? pg_model_head(model)->increment : pgl_check_tensor(L, 3)->tensor;
  if (!matrix) return luaL_error(L, "hilbert: the head has no increment before the first update");
  return push_hilbert(L, model, pg_run_activations(r->run), panel, matrix, pg_run_comm(r->run),
                      ranges);
}

static void release_activations(void *a) {
  pg_activations_free(a);
}

int pgl_evaluate(lua_State *L, int arg, int64_t sequences, pgl_evaluation *e) {
  pgl_object *o = pgl_check(L, arg, &pgl_model_kind);
  e->model = ((pgl_model *)o->resource)->model;
  const pg_model_config *config = pg_model_get_config(e->model);
  e->box = pgl_own(L, release_activations); /* this may collect */
  pgl_check_open(L, o, "model");
  int status = pg_activations_new(pg_model_context(e->model), config, pg_model_compute(e->model),
                                  sequences, config->context, PG_KEEP_NOTHING, &e->activations);
  if (status < 0) return pgl_fail(L, pg_model_context(e->model), status);
  *e->box = e->activations;
  return 0;
}

int pgl_evaluate_both(lua_State *L, pgl_evaluation both[2]) {
  for (int i = 0; i < 2; i++) {
    const int results = pgl_evaluate(L, i + 1, 4, &both[i]);
    if (results > 0) return results;
  }
  pgl_check(L, 1, &pgl_model_kind);
  return 0;
}

/* core.hilbert(model, panel, matrix [, ranges]) */
static int hilbert(lua_State *L) {
  lua_settop(L, 4);
  float *ranges = want_ranges(L, 4, pgl_check(L, 2, &pgl_panel_kind)->resource);
  pgl_evaluation e;
  int results = pgl_evaluate(L, 1, 4, &e);
  if (results > 0) return results;
  pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  results = push_hilbert(L, e.model, e.activations, panel, pgl_check_tensor(L, 3)->tensor,
                         pg_comm_self(), ranges);
  pgl_disown(e.box);
  return results;
}

/* ---- two models
 * ------------------------------------------------------------------------------------ */
/* core.panel_losses(model, panel) -> list of the cross entropies of each position's next token */
static int panel_losses(lua_State *L) {
  lua_settop(L, 2);
  pgl_check(L, 1, &pgl_model_kind);
  const int64_t tokens = pg_panel_tokens(pgl_check(L, 2, &pgl_panel_kind)->resource);
  float *losses = lua_newuserdatauv(L, sizeof(float) * (size_t)tokens, 0);
  pgl_evaluation e;
  const int results = pgl_evaluate(L, 1, 4, &e);
  if (results > 0) return results;
  const pg_panel *panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  int status = pg_panel_losses(e.model, e.activations, panel, losses);
  if (status < 0) return pgl_fail(L, pg_model_context(e.model), status);
  pgl_disown(e.box);
  push_numbers(L, losses, tokens);
  return 1;
}

/* core.hilbert_between(from, to, panel) -> rms, list of the distances */
static int hilbert_between(lua_State *L) {
  lua_settop(L, 3);
  const int64_t tokens = pg_panel_tokens(pgl_check(L, 3, &pgl_panel_kind)->resource);
  float *ranges = lua_newuserdatauv(L, sizeof(float) * (size_t)tokens, 0);
  pgl_evaluation e[2];
  const int results = pgl_evaluate_both(L, e);
  if (results > 0) return results;
  double rms = 0;
  const pg_panel *panel = pgl_check(L, 3, &pgl_panel_kind)->resource;
  int status = pg_hilbert_between(e[0].model, e[0].activations, e[1].model, e[1].activations, panel,
                                  &rms, ranges);
  if (status < 0) return pgl_fail(L, pg_model_context(e[1].model), status);
  for (int i = 0; i < 2; i++) pgl_disown(e[i].box);
  lua_pushnumber(L, rms);
  push_numbers(L, ranges, tokens);
  return 2;
}

/* ---- validation
 * ------------------------------------------------------------------------------------ */
static double monotonic(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Validation on the prefix of max(1, floor(tokens / (micro * ranks * time))) groups (SPEC §2);
 * pushes the table of results. */
static int push_validation(lua_State *L, const pg_model *model, pg_activations *a, const char *data,
                           const char *val, int64_t micro, int64_t tokens, pg_comm *comm) {
  const pg_model_config *config = pg_model_get_config(model);
  pg_context *ctx = pg_model_context(model);
  const int64_t sequences = micro * pg_comm_world(comm);
  const int64_t group = sequences * config->context, batches = pg__max(1, tokens / group);
  pg_loader_options options = {.folder = data,
                               .pattern = val,
                               .time = config->context,
                               .batch = sequences,
                               .micro = micro,
                               .rank = pg_comm_rank(comm),
                               .world = pg_comm_world(comm),
                               .vocab = config->vocab};
  pg_loader *loader = NULL;
  double loss = 0, start = monotonic();
  int status;
  PG_TRY(pg_loader_open(ctx, &options, &loader));
  PG_TRY(pg_validate_shared(model, a, loader, batches, comm, &loss));
fail:
  pg_loader_close(loader);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, 0, 4);
  pgl_set_number(L, "loss", loss);
  pgl_set_integer(L, "tokens", batches * group);
  pgl_set_integer(L, "batches", batches);
  pgl_set_number(L, "seconds", monotonic() - start);
  return 1;
}

/* run:validate{ tokens } */
int pgl_run_validate(lua_State *L) {
  static const char *const keys[] = {"tokens", NULL};
  pgl_run *r = pgl_check_run(L, 1, "validate")->resource;
  int64_t tokens = 0;
  lua_settop(L, 2);
  pgl_table(L, 2, "validate", keys);
  pgl_need(L, pgl_get_integer(L, 2, "validate", "tokens", 1, INT64_MAX, &tokens), "validate",
           "tokens");
  return push_validation(L, pg_run_model(r->run), pg_run_activations(r->run), r->data, r->val,
                         r->micro, tokens, pg_run_comm(r->run));
}

/* core.model_validate(model, { data, val, micro, tokens }) */
static int model_validate(lua_State *L) {
  static const char *const keys[] = {"data", "val", "micro", "tokens", NULL};
  const char *what = "model_validate", *data = NULL, *val = "*_val_*.bin";
  int64_t micro = 1, tokens = 0;
  pgl_check(L, 1, &pgl_model_kind);
  lua_settop(L, 2);
  pgl_table(L, 2, what, keys);
  pgl_need(L, pgl_get_string(L, 2, what, "data", &data), what, "data");
  pgl_get_string(L, 2, what, "val", &val);
  pgl_get_integer(L, 2, what, "micro", 1, 1 << 20, &micro);
  pgl_need(L, pgl_get_integer(L, 2, what, "tokens", 1, INT64_MAX, &tokens), what, "tokens");
  pgl_evaluation e;
  int results = pgl_evaluate(L, 1, micro, &e);
  if (results > 0) return results;
  results = push_validation(L, e.model, e.activations, data, val, micro, tokens, pg_comm_self());
  pgl_disown(e.box);
  return results;
}

static const luaL_Reg methods[] = {{"hash", panel_hash},
                                   {"tokens", panel_tokens},
                                   {"context", panel_context},
                                   {"lengths", panel_lengths},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"panel", panel_new},
                                     {"hilbert", hilbert},
                                     {"panel_losses", panel_losses},
                                     {"hilbert_between", hilbert_between},
                                     {"model_validate", model_validate},
                                     {NULL, NULL}};

void pgl_open_geometry(lua_State *L) {
  pgl_define(L, &pgl_panel_kind, methods);
  luaL_getmetatable(L, pgl_panel_kind.type);
  lua_pushcfunction(L, panel_tostring);
  lua_setfield(L, -2, "__tostring");
  lua_pop(L, 1);
  luaL_setfuncs(L, functions, 0);
}
