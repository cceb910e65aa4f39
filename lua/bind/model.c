/* Models: their configuration, weights, and parameter objects. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>

static void release_model(pgl_object *o) {
  pgl_model *m = o->resource;
  pg_activations_free(m->generation);
  pg_model_free(m->model);
  free(m);
}

/* The uservalue is the list of parameter objects. */
const pgl_kind pgl_model_kind = {"perigee.model", "model", 1, release_model};

static pgl_model *check_model(lua_State *L, int arg) {
  return pgl_check(L, arg, &pgl_model_kind)->resource;
}

/* ---- configuration --------------------------------------------------------------------------- */
static void read_init_std(lua_State *L, int index, pg_model_config *config) {
  static const char *const keys[] = {"embedding", "backbone", "head", NULL};
  if (!pgl_raw(L, index, "init_std")) return;
  if (lua_type(L, -1) == LUA_TNUMBER) {
    for (int r = 0; r < PG_ROLES; r++) config->init_std[r] = lua_tonumber(L, -1);
  } else {
    pgl_table(L, -1, "model.init_std", keys);
    for (int r = 0; r < PG_ROLES; r++)
      pgl_get_number(L, -1, "model.init_std", pg_role_name((pg_role)r), &config->init_std[r]);
  }
  lua_pop(L, 1);
}

static void read_head(lua_State *L, int index, pg_head_config *head) {
  static const char *const keys[] = {"rank",          "extra",    "backward_rank",
                                     "backward_seed", "residual", NULL};
  bool residual = true;
  if (!pgl_raw(L, index, "head")) return;
  const int at = lua_gettop(L);
  pgl_table(L, at, "model.head", keys);
  pgl_get_integer(L, at, "model.head", "rank", 1, INT64_MAX, &head->rank);
  pgl_get_integer(L, at, "model.head", "extra", 0, INT64_MAX, &head->extra);
  pgl_get_integer(L, at, "model.head", "backward_rank", 1, INT64_MAX, &head->backward_rank);
  pgl_get_integer(L, at, "model.head", "backward_seed", 0, INT64_MAX, &head->backward_seed);
  pgl_get_boolean(L, at, "model.head", "residual", &residual);
  head->drop_residual = !residual;
  lua_pop(L, 1);
}

void pgl_read_config(lua_State *L, int index, pg_model_config *config) {
  static const char *const keys[] = {"preset",   "layers",      "width",   "heads",    "head_dim",
                                     "mlp",      "vocab",       "context", "norm_eps", "rope_base",
                                     "init_std", "logit_scale", "weights", "head",     NULL};
  struct pg_context scratch;
  const char *preset = NULL;
  int64_t weights = 0;
  pgl_scratch(&scratch);
  pgl_table(L, index, "model", keys);
  pg_model_config_default(config);
  if (pgl_get_string(L, index, "model", "preset", &preset) &&
      pg_model_config_preset(&scratch, preset, config) < 0)
    luaL_error(L, "model.preset: %s", pg_context_message(&scratch));
  const struct {
    const char *key;
    int64_t *value;
  } sizes[] = {{"layers", &config->layers},  {"width", &config->width},
               {"heads", &config->heads},    {"head_dim", &config->head_dim},
               {"mlp", &config->mlp},        {"vocab", &config->vocab},
               {"context", &config->context}};
  for (size_t i = 0; i < PG_COUNT(sizes); i++)
    pgl_get_integer(L, index, "model", sizes[i].key, 0, INT64_MAX, sizes[i].value);
  pgl_get_number(L, index, "model", "norm_eps", &config->norm_eps);
  pgl_get_number(L, index, "model", "rope_base", &config->rope_base);
  pgl_get_number(L, index, "model", "logit_scale", &config->logit_scale);
  read_init_std(L, index, config);
  read_head(L, index, &config->head);
  if (pg_model_config_resolve(&scratch, config) < 0)
    luaL_error(L, "%s", pg_context_message(&scratch));
  /* A resolved table may come back; its count must still be right. */
  if (pgl_get_integer(L, index, "model", "weights", 0, INT64_MAX, &weights) &&
      weights != pg_model_config_weights(config))
    luaL_error(L, "model.weights is %I but these sizes have %I", (LUAI_UACINT)weights,
               (LUAI_UACINT)pg_model_config_weights(config));
}

/* Nothing where tests of cause change nothing. */
static void push_head(lua_State *L, const pg_head_config *head) {
  if (!head->rank && !head->extra && !head->backward_rank && !head->drop_residual) return;
  lua_createtable(L, 0, 5);
  if (head->rank) pgl_set_integer(L, "rank", head->rank);
  if (head->extra) pgl_set_integer(L, "extra", head->extra);
  if (head->backward_rank) {
    pgl_set_integer(L, "backward_rank", head->backward_rank);
    pgl_set_integer(L, "backward_seed", head->backward_seed);
  }
  lua_pushboolean(L, !head->drop_residual);
  lua_setfield(L, -2, "residual");
  lua_setfield(L, -2, "head");
}

void pgl_push_config(lua_State *L, const pg_model_config *config) {
  lua_createtable(L, 0, 13);
  pgl_set_integer(L, "layers", config->layers);
  pgl_set_integer(L, "width", config->width);
  pgl_set_integer(L, "heads", config->heads);
  pgl_set_integer(L, "head_dim", config->head_dim);
  pgl_set_integer(L, "mlp", config->mlp);
  pgl_set_integer(L, "vocab", config->vocab);
  pgl_set_integer(L, "context", config->context);
  pgl_set_number(L, "norm_eps", config->norm_eps);
  pgl_set_number(L, "rope_base", config->rope_base);
  pgl_set_number(L, "logit_scale", config->logit_scale);
  lua_createtable(L, 0, PG_ROLES);
  for (int r = 0; r < PG_ROLES; r++)
    pgl_set_number(L, pg_role_name((pg_role)r), config->init_std[r]);
  lua_setfield(L, -2, "init_std");
  push_head(L, &config->head);
  pgl_set_integer(L, "weights", pg_model_config_weights(config));
}

static int model_config_resolve(lua_State *L) {
  pg_model_config config;
  lua_settop(L, 1);
  pgl_read_config(L, 1, &config);
  pgl_push_config(L, &config);
  return 1;
}

/* ---- parameters ------------------------------------------------------------------------------ */
pgl_parameter *pgl_check_parameter(lua_State *L, int arg) {
  pgl_parameter *p = luaL_checkudata(L, arg, PGL_PARAMETER);
  if (!p->model) luaL_error(L, "this parameter is closed");
  pgl_check_open(L, p->model, "parameter");
  return p;
}

static int parameter_collect(lua_State *L) {
  pgl_parameter *p = luaL_checkudata(L, 1, PGL_PARAMETER);
  pgl_object *model = p->model;
  p->model = NULL;
  if (model) pgl_unread(model);
  return 0;
}

static int parameter_tostring(lua_State *L) {
  pgl_parameter *p = pgl_check_parameter(L, 1);
  lua_pushfstring(L, "parameter %s [%I, %I]", p->parameter->name, (LUAI_UACINT)p->parameter->rows,
                  (LUAI_UACINT)p->parameter->columns);
  return 1;
}

/* The optimizer that updates p, or NULL. */
static const pg_optimizer *parameter_optimizer(const pgl_parameter *p) {
  pgl_object *run = ((pgl_model *)p->model->resource)->run;
  if (!run || run->closed || !run->resource || p->parameter->assignment < 0) return NULL;
  pg_assignment *a = pg_run_assignment(((pgl_run *)run->resource)->run, p->parameter->assignment);
  return a ? a->optimizer : NULL;
}

/* The slots of p as a table. Where the ranks hold parts of them, copies of the whole, in the order
 * of the descriptor: it takes all ranks. */
static void push_slots(lua_State *L, const pgl_parameter *p) {
  const pg_optimizer *o = parameter_optimizer(p);
  const pg_parameter *q = p->parameter;
  pgl_object *run = ((pgl_model *)p->model->resource)->run, *context = pgl_root(p->model);
  pgl_run *r = o ? run->resource : NULL;
  const bool split = o && o->slot_count && pg_run_sharded(r->run);
  if (split && (r->busy || r->alone))
    luaL_error(L, "the slots of %s are split over the ranks: %s cannot gather them", q->name,
               r->busy ? "an optimizer inside an update" : "one rank alone");
  lua_newtable(L);
  if (split) {
    const char *what = lua_pushfstring(L, "the slots of %s", q->name);
    if (pg_comm_meet(pg_run_comm(r->run), context->resource, what, NULL, 0) < 0)
      luaL_error(L, "%s", pg_context_message(context->resource));
    lua_pop(L, 1);
  }
  for (size_t i = 0; o && q->slots && i < o->slot_count; i++) {
    if (split) {
      pgl_tensor *t = pgl_push_tensor(L);
      pgl_check_open(L, run, "run");
      pgl_tensor_bind(t, context, NULL);
      if (pg_run_gather_slot(r->run, q, i, &t->tensor) < 0)
        luaL_error(L, "%s", pg_context_message(context->resource));
      pgl_tensor_made(L, t);
    } else {
      pgl_push_view(L, q->slots[i], context, run);
    }
    lua_setfield(L, -2, o->slots[i].name);
  }
}

static int parameter_index(lua_State *L) {
  static const char *const fields[] = {"name",     "role",      "layer",     "rows",
                                       "columns",  "updates",   "optimizer", "value",
                                       "gradient", "increment", "slots",     NULL};
  pgl_parameter *p = pgl_check_parameter(L, 1);
  const pg_parameter *q = p->parameter;
  pgl_model *m = p->model->resource;
  const char *key = pgl_string(L, 2, "field");
  int field = 0;
  while (fields[field] && strcmp(fields[field], key) != 0) field++;
  switch (field) {
  case 0: lua_pushstring(L, q->name); break;
  case 1: lua_pushstring(L, pg_role_name(q->role)); break;
  case 2:
    if (q->layer < 0)
      lua_pushnil(L);
    else
      lua_pushinteger(L, q->layer + 1);
    break;
  case 3: lua_pushinteger(L, q->rows); break;
  case 4: lua_pushinteger(L, q->columns); break;
  case 5: lua_pushinteger(L, q->updates); break;
  case 6: {
    const pg_optimizer *o = parameter_optimizer(p);
    lua_pushstring(L, o ? o->name : NULL);
    break;
  }
  case 7: return pgl_push_view(L, q->value, pgl_root(p->model), p->model);
  case 8: return pgl_push_view(L, q->gradient, pgl_root(p->model), m->run);
  case 9: return pgl_push_view(L, q->increment, pgl_root(p->model), m->run);
  case 10: push_slots(L, p); break;
  default:
    lua_getfield(L, LUA_REGISTRYINDEX, PGL_PARAMETER_METHODS);
    if (lua_getfield(L, -1, key) != LUA_TNIL) return 1;
    return luaL_error(L,
                      "a parameter has no field '%s'; the fields are name, role, layer, rows, "
                      "columns, updates, optimizer, value, gradient, increment, slots",
                      key);
  }
  return 1;
}

/* Push the model's list of parameter objects, made on first use. */
static void push_parameters(lua_State *L, int arg) {
  pgl_object *o = pgl_check(L, arg, &pgl_model_kind);
  if (lua_getiuservalue(L, arg, 1) == LUA_TTABLE) return;
  lua_pop(L, 1);
  const pg_model *model = ((pgl_model *)o->resource)->model;
  const size_t count = pg_model_count(model);
  lua_createtable(L, (int)count, 0);
  for (size_t i = 0; i < count; i++) {
    pgl_parameter *p = lua_newuserdatauv(L, sizeof *p, 0);
    memset(p, 0, sizeof *p);
    luaL_setmetatable(L, PGL_PARAMETER);
    pgl_check(L, arg, &pgl_model_kind);
    pgl_read(o);
    p->model = o;
    p->parameter = pg_model_parameter(model, i);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_pushvalue(L, -1);
  lua_setiuservalue(L, arg, 1);
}

void pgl_push_parameter(lua_State *L, int model, const pg_parameter *p) {
  model = lua_absindex(L, model);
  push_parameters(L, model);
  const pg_model *m = check_model(L, model)->model;
  size_t i = 0;
  while (i < pg_model_count(m) && pg_model_parameter(m, i)->name != p->name) i++;
  lua_rawgeti(L, -1, (lua_Integer)i + 1); /* nil past the end */
  lua_remove(L, -2);
}

static int model_parameters(lua_State *L) {
  lua_settop(L, 1);
  push_parameters(L, 1);
  return 1;
}

static int model_find(lua_State *L) {
  const pg_parameter *p = pg_model_find(check_model(L, 1)->model, pgl_string(L, 2, "name"));
  lua_settop(L, 1);
  if (!p)
    lua_pushnil(L);
  else
    pgl_push_parameter(L, 1, p);
  return 1;
}

/* ---- models ------------------------------------------------------------------------------------
 */
pg_dtype pgl_compute(lua_State *L, int arg) {
  const char *compute = lua_isnil(L, arg) ? "fp32" : pgl_string(L, arg, "compute");
  if (strcmp(compute, "fp32") == 0) return PG_F32;
  if (strcmp(compute, "bf16") != 0)
    luaL_error(L, "compute: \"fp32\" or \"bf16\" expected, got \"%s\"", compute);
  return PG_BF16;
}

/* core.model(ctx, config [, "fp32"|"bf16"]) */
static int model_new(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  pg_model_config config;
  lua_settop(L, 3);
  pgl_read_config(L, 2, &config);
  const pg_dtype compute = pgl_compute(L, 3);
  pgl_object *o = pgl_new(L, &pgl_model_kind, context);
  pgl_model *m = calloc(1, sizeof *m);
  if (!m) return pgl_fail_text(L, PG_ENOMEM, NULL);
  o->resource = m;
  int status = pg_model_new(context->resource, &config, &m->model);
  if (status == 0) status = pg_model_set_compute(m->model, compute);
  if (status < 0) return pgl_fail(L, context->resource, status);
  return 1;
}

static int model_config(lua_State *L) {
  pgl_push_config(L, pg_model_get_config(check_model(L, 1)->model));
  return 1;
}

/* Finish a model method that may fail: true, or nil, text, name. */
static int done(lua_State *L, int status) {
  if (status < 0) return pgl_fail(L, pgl_context(pgl_check(L, 1, &pgl_model_kind)), status);
  lua_pushboolean(L, true);
  return 1;
}

static int model_init(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  return done(L, pg_model_init(m->model, (uint64_t)pgl_integer(L, 2, "seed", 0, INT64_MAX)));
}

static int model_load(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  return done(L, pg_model_load(m->model, pgl_string(L, 2, "path")));
}

static int model_save(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  return done(L, pg_model_save(m->model, pgl_string(L, 2, "path")));
}

static int model_copy(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  return done(L, pg_model_copy(m->model, check_model(L, 2)->model));
}

static int model_compute(lua_State *L) {
  const pg_model *model = check_model(L, 1)->model;
  lua_pushstring(L, pg_model_compute(model) == PG_BF16 ? "bf16" : "fp32");
  return 1;
}

/* model:refresh([name]): after a value was changed, what products read of it */
static int model_refresh(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  const pg_parameter *p = NULL;
  if (!lua_isnoneornil(L, 2)) {
    const char *name = pgl_string(L, 2, "name");
    if (!(p = pg_model_find(m->model, name)))
      return luaL_error(L, "refresh: no parameter is called '%s'", name);
  }
  return done(L, pg_model_refresh(m->model, p));
}

/* model:sha256([name]) -> 64 hex digits, of all weights or of one parameter's */
static int model_sha256(lua_State *L) {
  pgl_model *m = check_model(L, 1);
  const pg_parameter *p = NULL;
  char hex[65];
  if (!lua_isnoneornil(L, 2) && !(p = pg_model_find(m->model, pgl_string(L, 2, "name"))))
    return luaL_error(L, "sha256: no parameter is called '%s'", lua_tostring(L, 2));
  int status = pg_model_sha256(m->model, p, hex);
  if (status < 0) return pgl_fail(L, pg_model_context(m->model), status);
  lua_pushstring(L, hex);
  return 1;
}

/* ---- text
 * ---------------------------------------------------------------------------------------- */
/* core.generate(model, tokens, { temperature, top_k, seed, index }) -> the next token id */
static int model_generate(lua_State *L) {
  static const char *const keys[] = {"temperature", "top_k", "seed", "index", NULL};
  pgl_object *o = pgl_check(L, 1, &pgl_model_kind);
  pgl_model *m = o->resource;
  const pg_model_config *config = pg_model_get_config(m->model);
  pg_generate_options options = {1, 0, 0};
  int64_t seed = 0, index = 0;
  luaL_checktype(L, 2, LUA_TTABLE);
  lua_settop(L, 3);
  if (!lua_isnil(L, 3)) {
    pgl_table(L, 3, "generate", keys);
    pgl_get_number(L, 3, "generate", "temperature", &options.temperature);
    pgl_get_integer(L, 3, "generate", "top_k", 0, INT64_MAX, &options.top_k);
    pgl_get_integer(L, 3, "generate", "seed", INT64_MIN, INT64_MAX, &seed);
    pgl_get_integer(L, 3, "generate", "index", 0, INT64_MAX, &index);
  }
  if (!(options.temperature >= 0))
    return luaL_error(L, "generate.temperature: at least 0 expected, got %f", options.temperature);
  options.seed = (uint64_t)seed;

  const int64_t given = (int64_t)lua_rawlen(L, 2), count = pg__min(given, config->context);
  if (count == 0) return luaL_error(L, "generate: at least one token expected");
  int32_t *tokens = lua_newuserdatauv(L, sizeof *tokens * (size_t)count, 0);
  pgl_check_open(L, o, "model");
  for (int64_t i = 0; i < count; i++) {
    int exact = 0;
    lua_rawgeti(L, 2, given - count + i + 1);
    lua_Integer id = lua_type(L, -1) == LUA_TNUMBER ? lua_tointegerx(L, -1, &exact) : 0;
    if (!exact || id < 0 || id >= config->vocab)
      return luaL_error(L, "generate: token %I must be an id from 0 to %I, got %s",
                        (LUAI_UACINT)(given - count + i + 1), (LUAI_UACINT)config->vocab - 1,
                        pgl_describe(L, -1));
    tokens[i] = (int32_t)id;
    lua_pop(L, 1);
  }
  pg_context *ctx = pgl_context(o);
  int32_t next = 0;
  int status = 0;
  if (!m->generation)
    status = pg_activations_new(ctx, config, pg_model_compute(m->model), 1, config->context,
                                PG_KEEP_NOTHING, &m->generation);
  if (status == 0)
    status =
        pg_generate_next(m->model, m->generation, tokens, count, &options, (uint64_t)index, &next);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushinteger(L, next);
  return 1;
}

static const luaL_Reg methods[] = {{"config", model_config},
                                   {"parameters", model_parameters},
                                   {"find", model_find},
                                   {"init", model_init},
                                   {"load", model_load},
                                   {"save", model_save},
                                   {"copy", model_copy},
                                   {"compute", model_compute},
                                   {"refresh", model_refresh},
                                   {"sha256", model_sha256},
                                   {NULL, NULL}};
static const luaL_Reg parameter_meta[] = {{"__gc", parameter_collect},
                                          {"__tostring", parameter_tostring},
                                          {"__index", parameter_index},
                                          {NULL, NULL}};
static const luaL_Reg functions[] = {{"model", model_new},
                                     {"model_config", model_config_resolve},
                                     {"generate", model_generate},
                                     {NULL, NULL}};

void pgl_open_model(lua_State *L) {
  pgl_define(L, &pgl_model_kind, methods);
  luaL_getmetatable(L, pgl_model_kind.type);
  lua_getfield(L, -1, "__index");
  lua_setfield(L, -3, "model_methods");
  lua_pop(L, 1);
  luaL_newmetatable(L, PGL_PARAMETER);
  luaL_setfuncs(L, parameter_meta, 0);
  lua_pop(L, 1);
  luaL_setfuncs(L, functions, 0);
  lua_newtable(L);
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, PGL_PARAMETER_METHODS);
  lua_setfield(L, -2, "parameter_methods");
}
