/* Logits over a panel (core/logits.h) and the size of weights (core/weight_size.h): what
 * lua/perigee/geometry/logits.lua and weights.lua make results of. */
#include "bind.h"
#include <math.h>
#include <stdlib.h>

/* What the arguments `at` (a model, or a run over all its ranks) and `at` + 1 (a panel) say. */
typedef struct place {
  const pg_model *model;
  pg_activations *a;
  const pg_panel *panel;
  pg_comm *comm;
  void **box; /* of activations of ours; NULL: the run's */
} place;

/* 0, or the number of results of pgl_fail. */
static int open_place(lua_State *L, place *p) {
  *p = (place){0};
  if (luaL_testudata(L, 1, pgl_run_kind.type)) {
    pgl_run *r = pgl_check_run(L, 1, "logits")->resource;
    p->model = pg_run_model(r->run);
    p->a = pg_run_activations(r->run);
    p->comm = pg_run_comm(r->run);
  } else {
    pgl_evaluation e;
    const int results = pgl_evaluate(L, 1, 4, &e);
    if (results > 0) return results;
    p->model = e.model, p->a = e.activations, p->box = e.box;
  }
  p->panel = pgl_check(L, 2, &pgl_panel_kind)->resource;
  return 0;
}

static void close_place(place *p) {
  if (p->box) pgl_disown(p->box);
}

static int push_logits(lua_State *L, const pg_logits *z) {
  lua_createtable(L, 0, 10);
  pgl_set_number(L, "rms", z->rms);
  pgl_set_number(L, "centered_rms", z->centered_rms);
  pgl_set_number(L, "max_abs", z->max_abs);
  pgl_set_number(L, "centered_max_abs", z->centered_max_abs);
  pgl_set_number(L, "logsumexp_mean", z->logsumexp_mean);
  pgl_set_number(L, "logsumexp_max", z->logsumexp_max);
  pgl_set_number(L, "prob_entropy_mean", z->entropy_mean);
  pgl_set_number(L, "prob_max_mean", z->prob_max_mean);
  pgl_set_number(L, "seconds", z->seconds);
  return 1;
}

/* core.logits(model or run, panel) -> the statistics */
static int logits(lua_State *L) {
  place p;
  pg_logits z;
  lua_settop(L, 2);
  const int results = open_place(L, &p);
  if (results > 0) return results;
  const int status = pg_panel_logits(p.model, p.a, p.panel, p.comm, &z);
  if (status < 0) return pgl_fail(L, pg_model_context(p.model), status);
  close_place(&p);
  return push_logits(L, &z);
}

/* core.logits_states(head, hidden, scale) -> the same */
static int logits_states(lua_State *L) {
  const pgl_tensor *head = pgl_check_tensor(L, 1), *hidden = pgl_check_tensor(L, 2);
  pg_logits z;
  const int status = pg_logits_states(head->tensor, hidden->tensor, pgl_number(L, 3, "scale"), &z);
  if (status < 0) return pgl_fail(L, pgl_context(head->context), status);
  return push_logits(L, &z);
}

/* core.attention_logits(model or run, panel) -> { { largest of each head } of each block },
 * seconds */
static int attention_logits(lua_State *L) {
  place p;
  double seconds;
  lua_settop(L, 2);
  const int results = open_place(L, &p);
  if (results > 0) return results;
  const pg_model_config *c = pg_model_get_config(p.model);
  float *largest = lua_newuserdatauv(L, (size_t)(c->layers * c->heads) * sizeof *largest + 1, 0);
  pgl_check(L, 2, &pgl_panel_kind);
  const int status = pg_panel_attention(p.model, p.a, p.panel, p.comm, largest, &seconds);
  if (status < 0) return pgl_fail(L, pg_model_context(p.model), status);
  lua_createtable(L, (int)c->layers, 0);
  for (int64_t i = 0; i < c->layers; i++) {
    lua_createtable(L, (int)c->heads, 0);
    for (int64_t h = 0; h < c->heads; h++) {
      lua_pushnumber(L, (double)largest[i * c->heads + h]);
      lua_rawseti(L, -2, h + 1);
    }
    lua_rawseti(L, -2, i + 1);
  }
  close_place(&p);
  lua_pushnumber(L, seconds);
  return 2;
}

static int push_log_rank(lua_State *L, const pg_log_rank *r, const double *values) {
  lua_createtable(L, 0, 8);
  pgl_set_integer(L, "rank", r->rank);
  pgl_set_integer(L, "bound", r->bound);
  pgl_set_number(L, "effective", r->effective);
  pgl_set_number(L, "stable", r->stable);
  pgl_set_number(L, "largest", r->largest);
  pgl_set_number(L, "seconds", r->seconds);
  lua_createtable(L, (int)r->bound, 0);
  for (int64_t i = 0; i < r->bound; i++) {
    lua_pushnumber(L, values[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "values");
  return 1;
}

/* core.log_rank(model or run, panel) -> { rank, bound, effective, stable, largest, values, seconds
 * } */
static int log_rank(lua_State *L) {
  place p;
  pg_log_rank r;
  lua_settop(L, 2);
  const int results = open_place(L, &p);
  if (results > 0) return results;
  const int64_t most = pg_model_head(p.model)->columns + 1;
  double *values = lua_newuserdatauv(L, (size_t)most * sizeof *values, 0);
  pgl_check(L, 2, &pgl_panel_kind);
  const int status = pg_panel_log_rank(p.model, p.a, p.panel, p.comm, &r, values);
  if (status < 0) return pgl_fail(L, pg_model_context(p.model), status);
  close_place(&p);
  return push_log_rank(L, &r, values);
}

/* core.log_rank_states(head, hidden, scale) -> the same */
static int log_rank_states(lua_State *L) {
  lua_settop(L, 3);
  const pgl_tensor *head = pgl_check_tensor(L, 1), *hidden = pgl_check_tensor(L, 2);
  const double scale = pgl_number(L, 3, "scale");
  const size_t most = head->tensor->ndim == 2 ? (size_t)head->tensor->shape[1] + 1 : 1;
  double *values = lua_newuserdatauv(L, most * sizeof *values, 0);
  pg_log_rank r;
  const int status = pg_log_rank_states(head->tensor, hidden->tensor, scale, &r, values);
  if (status < 0) return pgl_fail(L, pgl_context(head->context), status);
  return push_log_rank(L, &r, values);
}

/* core.weight_size(tensor, name [, change]) -> { norm, largest, row_min, row_max, column_max,
 * mean_row, product or nil, mean = list, seconds } */
static int weight_size(lua_State *L) {
  lua_settop(L, 3);
  const pgl_tensor *t = pgl_check_tensor(L, 1);
  const char *name = pgl_string(L, 2, "name");
  const int64_t columns = t->tensor->ndim == 2 ? t->tensor->shape[1] : 0;
  double *mean = lua_newuserdatauv(L, (size_t)columns * sizeof *mean + 1, 0);
  pg_weight_size w;
  t = pgl_check_tensor(L, 1);
  const pg_tensor *change = lua_isnil(L, 3) ? NULL : pgl_check_tensor(L, 3)->tensor;
  const int status = pg_weight_measure(t->tensor, change, name, mean, &w);
  if (status < 0) return pgl_fail(L, pgl_context(t->context), status);
  lua_createtable(L, 0, 9);
  pgl_set_number(L, "norm", w.norm);
  pgl_set_number(L, "largest", w.largest);
  pgl_set_number(L, "row_min", w.row_min);
  pgl_set_number(L, "row_max", w.row_max);
  pgl_set_number(L, "column_max", w.column_max);
  pgl_set_number(L, "mean_row", w.mean_row);
  if (change) pgl_set_number(L, "product", w.product);
  pgl_set_number(L, "seconds", w.seconds);
  lua_createtable(L, (int)columns, 0);
  for (int64_t j = 0; j < columns; j++) {
    lua_pushnumber(L, mean[j]);
    lua_rawseti(L, -2, j + 1);
  }
  lua_setfield(L, -2, "mean");
  return 1;
}

static const luaL_Reg functions[] = {{"logits", logits},
                                     {"logits_states", logits_states},
                                     {"log_rank_states", log_rank_states},
                                     {"attention_logits", attention_logits},
                                     {"log_rank", log_rank},
                                     {"weight_size", weight_size},
                                     {NULL, NULL}};

void pgl_open_logits(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
