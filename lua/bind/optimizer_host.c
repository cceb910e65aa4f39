/* Optimizers written in Lua: a descriptor made from a table, and the call of its function from
 * inside pg_run_step. That call is protected: an error becomes PG_EHOST, and run:step raises the
 * original error object again. */
#include "../../core/finite.h"
#include "../../core/optimizers/compose.h"
#include "bind.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static char *copy_name(lua_State *L, const char *name) {
  char *copy = strdup(name);
  if (!copy) luaL_error(L, "define_optimizer: out of memory");
  return copy;
}

/* Push the keys of the table at `index`, sorted by bytes, as a list; returns their number. Sorting
 * makes the order of slots and hyperparameters the same in every process. */
static size_t push_sorted_keys(lua_State *L, int index, const char *what) {
  size_t count = 0;
  lua_newtable(L);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING)
      luaL_error(L, "define_optimizer.%s: names must be strings, got %s", what,
                 (lua_pushvalue(L, -2), pgl_describe(L, -1)));
    size_t at = count++;
    for (; at > 0; at--) { /* insertion: there are only a few */
      lua_rawgeti(L, -3, (lua_Integer)at);
      if (strcmp(lua_tostring(L, -1), lua_tostring(L, -3)) <= 0) {
        lua_pop(L, 1);
        break;
      }
      lua_rawseti(L, -4, (lua_Integer)at + 1);
    }
    lua_pushvalue(L, -2);
    lua_rawseti(L, -4, (lua_Integer)at + 1);
  }
  return count;
}

static void read_slots(lua_State *L, int index, pgl_optimizer *p) {
  static const char *const shapes[] = {"matrix",         "row",    "column",      "rows_square",
                                       "columns_square", "scalar", "rows_factor", "columns_factor"};
  if (lua_type(L, index) != LUA_TTABLE)
    luaL_error(L, "define_optimizer.slots: a table name -> shape expected, got %s",
               pgl_describe(L, index));
  size_t count = push_sorted_keys(L, index, "slots");
  if (count > PG_MAX_SLOTS)
    luaL_error(L, "define_optimizer.slots: at most %d slots, got %d", PG_MAX_SLOTS, (int)count);
  for (size_t i = 0; i < count; i++) {
    size_t shape = 0;
    lua_rawgeti(L, -1, (lua_Integer)i + 1);
    const char *name = lua_tostring(L, -1);
    lua_getfield(L, index, name);
    if (lua_type(L, -1) == LUA_TSTRING)
      while (shape < PG_COUNT(shapes) && strcmp(shapes[shape], lua_tostring(L, -1)) != 0) shape++;
    else
      shape = PG_COUNT(shapes);
    if (shape == PG_COUNT(shapes))
      luaL_error(L,
                 "define_optimizer.slots.%s: matrix, row, column, rows_square, columns_square, "
                 "scalar, rows_factor or columns_factor expected, got %s",
                 name, pgl_describe(L, -1));
    p->slots[i] = (pg_slot){copy_name(L, name), (pg_slot_shape)shape, PG_F32};
    p->own.slot_count = i + 1;
    lua_pop(L, 2);
  }
  lua_pop(L, 1);
}

static void add_hyper(lua_State *L, pgl_optimizer *p, const char *name, const pg_hyper *like) {
  int values = 0;
  for (size_t i = 0; i < p->own.hyper_count; i++)
    values += p->hypers[i].kind == PG_HYPER_PAIR ? 2 : 1;
  if (values + (like->kind == PG_HYPER_PAIR ? 2 : 1) > PG_MAX_HYPERS)
    luaL_error(L, "define_optimizer.defaults: more than %d values", PG_MAX_HYPERS);
  pg_hyper *hyper = &p->hypers[p->own.hyper_count];
  *hyper = *like;
  hyper->name = copy_name(L, name);
  p->own.hyper_count++;
}

/* The default at the top decides the kind: number, boolean or {a, b}. */
static void read_default(lua_State *L, pgl_optimizer *p, const char *name) {
  pg_hyper hyper = {.help = "", .min = -HUGE_VAL, .max = HUGE_VAL};
  switch (lua_type(L, -1)) {
  case LUA_TNUMBER:
    hyper.kind = PG_HYPER_NUMBER;
    hyper.initial[0] = lua_tonumber(L, -1);
    if (strcmp(name, "lr") == 0 || strcmp(name, "weight_decay") == 0) hyper.min = 0;
    break;
  case LUA_TBOOLEAN:
    hyper.kind = PG_HYPER_BOOLEAN;
    hyper.initial[0] = lua_toboolean(L, -1);
    hyper.min = 0;
    hyper.max = 1;
    break;
  case LUA_TTABLE:
    hyper.kind = PG_HYPER_PAIR;
    for (int i = 0; i < 2; i++) {
      if (lua_rawgeti(L, -1, i + 1) != LUA_TNUMBER)
        luaL_error(L, "define_optimizer.defaults.%s: two numbers {a, b} expected", name);
      hyper.initial[i] = lua_tonumber(L, -1);
      lua_pop(L, 1);
    }
    break;
  default:
    luaL_error(L,
               "define_optimizer.defaults.%s: a number, a boolean or a pair {a, b} expected, "
               "got %s",
               name, pgl_describe(L, -1));
  }
  if (!isfinite(hyper.initial[0]) || !isfinite(hyper.initial[1]))
    luaL_error(L, "define_optimizer.defaults.%s: finite numbers expected", name);
  add_hyper(L, p, name, &hyper);
}

static void read_defaults(lua_State *L, int index, pgl_optimizer *p) {
  bool decay = false, lr = false;
  if (lua_type(L, index) != LUA_TTABLE)
    luaL_error(L, "define_optimizer.defaults: a table expected, got %s", pgl_describe(L, index));
  size_t count = push_sorted_keys(L, index, "defaults");
  for (size_t i = 0; i < count; i++) {
    lua_rawgeti(L, -1, (lua_Integer)i + 1);
    const char *name = lua_tostring(L, -1);
    lr = lr || strcmp(name, "lr") == 0;
    decay = decay || strcmp(name, "weight_decay") == 0;
    lua_getfield(L, index, name);
    read_default(L, p, name);
    lua_pop(L, 2);
  }
  lua_pop(L, 1);
  if (!lr) luaL_error(L, "define_optimizer.defaults.lr is required");
  if (!decay) {
    lua_pushnumber(L, 0);
    read_default(L, p, "weight_decay");
    lua_pop(L, 1);
  }
}

/* Nobody can know: the increment and three temporaries of its shape are common. */
static int64_t host_scratch(const pg_increment_group *group) {
  return 4 * group->rows * group->columns * (int64_t)sizeof(float);
}

/* core.define_optimizer{ name, slots, defaults, increment } */
int pgl_define_optimizer(lua_State *L) {
  static const char *const keys[] = {"name", "slots", "defaults", "increment", "help", NULL};
  const char *what = "define_optimizer", *name = NULL;
  lua_settop(L, 1);
  pgl_table(L, 1, what, keys);
  pgl_need(L, pgl_get_string(L, 1, what, "name", &name), what, "name");
  pgl_need(L, pgl_raw(L, 1, "increment"), what, "increment"); /* 2 */
  if (lua_type(L, 2) != LUA_TFUNCTION)
    return luaL_error(L, "define_optimizer.increment: a function expected, got %s",
                      pgl_describe(L, 2));
  pgl_object *o = pgl_new(L, &pgl_optimizer_kind, NULL); /* 3 */
  lua_pushvalue(L, 2);
  lua_setiuservalue(L, 3, 1);
  pgl_optimizer *p = calloc(1, sizeof *p);
  if (!p) return pgl_fail_text(L, PG_ENOMEM, NULL);
  o->resource = p;
  p->descriptor = &p->own;
  p->own = (pg_optimizer){.help = "defined in Lua",
                          .hypers = p->hypers,
                          .slots = p->slots,
                          .sharding = PG_SHARD_WHOLE,
                          .applies = true,
                          .increment = pgl_host_increment,
                          .scratch = host_scratch,
                          .self = p};
  p->own.name = copy_name(L, name);
  if (pgl_raw(L, 1, "slots")) {
    read_slots(L, lua_gettop(L), p);
    lua_pop(L, 1);
  }
  pgl_need(L, pgl_raw(L, 1, "defaults"), what, "defaults");
  read_defaults(L, lua_gettop(L), p);
  lua_settop(L, 3);
  return 1;
}

/* ---- the call ---------------------------------------------------------------------------------
 */
typedef struct call {
  const pg_increment_group *group;
  size_t index; /* into the group */
  pgl_optimizer *optimizer;
  pgl_object *run;
  pg_tensor *lent[PG_MAX_SLOTS + 2]; /* that this call has shown and takes back */
  size_t lent_count;
} call;

/* Push a tensor over `data`, memory of the group. Where that is part of `known`, a tensor of the
 * parameter, it is a view that keeps it alive; elsewhere, as in a trial, it ends with the call. */
static void push_memory(lua_State *L, call *c, const pg_tensor *known, const void *data,
                        pg_dtype dtype, int ndim, const int64_t *shape, pgl_object *owner) {
  pg_context *ctx = c->group->context;
  const char *start = known ? known->storage->memory : NULL;
  int64_t stride[2] = {ndim == 2 ? shape[1] : 1, 1}, offset = 0;
  pgl_tensor *view = pgl_push_tensor(L);
  int status = 0;
  pgl_tensor_bind(view, pgl_root(c->run), owner);
  if (known && (const char *)data >= start && (const char *)data < start + known->storage->bytes) {
    offset = ((const char *)data - (const char *)known->data) / (int64_t)pg_dtype_size(dtype);
  } else {
    pg_tensor **lent = &c->lent[c->lent_count++];
    status = pg__tensor_lend(ctx, (void *)(uintptr_t)data, dtype, ndim, shape, lent);
    known = *lent;
  }
  if (status == 0) status = pg_tensor_view(known, offset, ndim, shape, stride, &view->tensor);
  if (status < 0) luaL_error(L, "%s", pg_context_message(ctx));
}

/* w = { gradient, value, slots, updates, name, role, rows, columns, parameter } */
static void push_parameter_state(lua_State *L, call *c, int model) {
  const pg_parameter *p = c->group->parameters[c->index];
  pg_run *run = ((pgl_run *)c->run->resource)->run;
  const pg_optimizer *o = c->optimizer->descriptor;
  const pg_increment_group *group = c->group;
  const int64_t all[2] = {group->rows, group->columns};
  lua_createtable(L, 0, 9);
  push_memory(L, c, p->gradient, group->gradients[c->index], PG_F32, 2, all, c->run);
  lua_setfield(L, -2, "gradient");
  push_memory(L, c, p->value, group->values[c->index], PG_F32, 2, all, c->run->parent);
  lua_setfield(L, -2, "value");
  lua_createtable(L, 0, (int)o->slot_count);
  for (size_t i = 0; i < o->slot_count; i++) {
    const bool own = p->assignment >= 0 && pg_run_assignment(run, p->assignment)->optimizer == o;
    int64_t shape[2];
    int ndim = pg_slot_dims(&o->slots[i], group->rows, group->columns, shape);
    push_memory(L, c, own ? p->slots[i] : NULL, group->slots[c->index][i], o->slots[i].dtype, ndim,
                shape, c->run);
    lua_setfield(L, -2, o->slots[i].name);
  }
  lua_setfield(L, -2, "slots");
  pgl_set_integer(L, "updates", group->updates[c->index]);
  pgl_set_string(L, "name", p->name);
  pgl_set_string(L, "role", pg_role_name(p->role));
  pgl_set_integer(L, "rows", group->rows);
  pgl_set_integer(L, "columns", group->columns);
  pgl_push_parameter(L, model, p);
  lua_setfield(L, -2, "parameter");
}

/* h: every hyperparameter, lr already scheduled. */
static void push_hypers(lua_State *L, const call *c) {
  const pg_optimizer *o = c->optimizer->descriptor;
  const double *value = c->group->hypers;
  lua_createtable(L, 0, (int)o->hyper_count);
  for (size_t i = 0; i < o->hyper_count; i++) {
    pgl_push_hyper(L, &o->hypers[i], value);
    lua_setfield(L, -2, o->hypers[i].name);
    value += o->hypers[i].kind == PG_HYPER_PAIR ? 2 : 1;
  }
  pgl_set_number(L, "lr", c->group->lr);
}

/* Bring `factor` times the returned tensor, which may be strided, to the group's target. */
static int take_increment(const call *c, const pg_tensor *t, double factor) {
  pg_context *ctx = c->group->context;
  const pg_target to = pg__target(c->group, c->index);
  pg_tensor *flat = NULL, *scaled = NULL;
  bool sure;
  int status;
  if (!pg_tensor_contiguous(t)) {
    PG_TRY(pg_tensor_clone(t, &flat));
    t = flat;
  }
  PG_TRY(pg__surely_finite(t, factor, &sure));
  if (!sure && factor != 1) {
    PG_TRY(pg_tensor_scalar("mul", t, factor, false, NULL, &scaled));
    t = scaled;
    factor = 1;
  }
  if (!sure) PG_TRY(pg__check_finite(t, "its increment"));
  PG_LAUNCH(ctx, apply, factor, PG_F32, t->data, pg_tensor_elements(t), 1, &to);
fail:
  pg_tensor_free(flat);
  pg_tensor_free(scaled);
  return status;
}

/* Arguments: the call as light userdata, the run's and the model's userdata. */
static int call_increment(lua_State *L) {
  call *c = lua_touserdata(L, 1);
  const char *name = c->optimizer->descriptor->name;
  const int64_t rows = c->group->rows, columns = c->group->columns;
  lua_getiuservalue(L, 2, 1);
  lua_rawgetp(L, -1, c->optimizer);
  lua_getiuservalue(L, -1, 1);
  push_parameter_state(L, c, 3);
  push_hypers(L, c);
  lua_call(L, 2, 1);
  if (!luaL_testudata(L, -1, PGL_TENSOR))
    return luaL_error(L, "optimizer '%s': increment returned %s, a tensor [%I, %I] is expected",
                      name, pgl_describe(L, -1), (LUAI_UACINT)rows, (LUAI_UACINT)columns);
  const pgl_tensor *t = pgl_check_multiple(L, -1);
  if (t->context != pgl_root(c->run))
    return luaL_error(L, "optimizer '%s': increment returned a tensor of another context", name);
  if (t->tensor->ndim != 2 || t->tensor->shape[0] != rows || t->tensor->shape[1] != columns ||
      t->tensor->dtype != PG_F32)
    return luaL_error(L,
                      "optimizer '%s': increment returned a tensor %s %s, F32 [%I, %I] is "
                      "expected",
                      name, pg_dtype_name(t->tensor->dtype), pgl_push_shape(L, t->tensor),
                      (LUAI_UACINT)rows, (LUAI_UACINT)columns);
  if (take_increment(c, t->tensor, t->scaled ? t->factor : 1) < 0)
    return luaL_error(L, "optimizer '%s' for %s: %s", name, c->group->parameters[c->index]->name,
                      pg_context_message(c->group->context));
  return 0;
}

int pgl_host_increment(const pg_increment_group *group, void *self) {
  pgl_optimizer *optimizer = self;
  pgl_frame *frame = pgl_frames;
  if (!frame || pgl_context(frame->run) != group->context)
    return pg_fail(group->context, PG_ESTATE,
                   "optimizer '%s' is written in Lua and can only be "
                   "called by run:step",
                   optimizer->descriptor->name);
  lua_State *L = frame->L;
  if (!frame->hosted) pgl_tensors_begin(group->context);
  frame->hosted = true;
  for (size_t i = 0; i < group->count; i++) {
    call c = {.group = group, .index = i, .optimizer = optimizer, .run = frame->run};
    if (!lua_checkstack(L, 8))
      return pg_fail(group->context, PG_ENOMEM, "optimizer '%s': the Lua stack is full",
                     optimizer->descriptor->name);
    lua_pushcfunction(L, call_increment);
    lua_pushlightuserdata(L, &c);
    lua_pushvalue(L, PGL_FRAME_RUN);
    lua_pushvalue(L, PGL_FRAME_MODEL);
    const int ended = lua_pcall(L, 3, 0, 0);
    for (size_t k = 0; k < c.lent_count; k++) pg__tensor_recall(c.lent[k]);
    if (ended != LUA_OK) {
      frame->failed = true;
      lua_replace(L, PGL_FRAME_ERROR);
      return pg_fail(group->context, PG_EHOST, "optimizer '%s' raised an error for %s",
                     optimizer->descriptor->name, group->parameters[i]->name);
    }
  }
  return 0;
}
