/* Increment against gradient, a run's last update against its prediction, and the gradient noise
 * scale (core/first_order.h). */
#include "bind.h"
#include <math.h>

/* NaN stands for "there is none". */
static void set_known(lua_State *L, const char *key, double value) {
  if (!isnan(value)) pgl_set_number(L, key, value);
}

/* core.first_order(gradient, increment) -> the numbers of pg_first_order */
static int first_order(lua_State *L) {
  const pgl_tensor *g = pgl_check_tensor(L, 1), *s = pgl_check_tensor(L, 2);
  pg_first_order x;
  int status = pg_first_order_measure(g->tensor, s->tensor, &x);
  if (status < 0) return pgl_fail(L, pgl_context(g->context), status);
  lua_createtable(L, 0, 11);
  pgl_set_number(L, "gain", x.gain);
  pgl_set_number(L, "oracle", x.oracle);
  set_known(L, "ratio", x.ratio);
  set_known(L, "cosine_gradient", x.cosine_gradient);
  set_known(L, "cosine_rownorm", x.cosine_rownorm);
  set_known(L, "common", x.common);
  pgl_set_number(L, "gradient_norm", x.gradient_norm);
  pgl_set_number(L, "increment_norm", x.increment_norm);
  pgl_set_number(L, "row_norms", x.row_norms);
  pgl_set_number(L, "diameter", x.diameter);
  pgl_set_number(L, "seconds", x.seconds);
  return 1;
}

/* run:prediction() -> { before, after, predicted, seconds } */
int pgl_run_prediction(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "prediction");
  pg_prediction p;
  int status = pg_run_prediction(((pgl_run *)o->resource)->run, &p);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_createtable(L, 0, 4);
  pgl_set_number(L, "before", p.before);
  pgl_set_number(L, "after", p.after);
  set_known(L, "predicted", p.predicted);
  pgl_set_number(L, "seconds", p.seconds);
  return 1;
}

/* run:measure_noise(on) */
int pgl_run_measure_noise(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "measure_noise");
  int status = pg_run_measure_noise(((pgl_run *)o->resource)->run, pgl_boolean(L, 2, "on"));
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

/* run:noise() -> the numbers of pg_noise */
int pgl_run_noise(lua_State *L) {
  pgl_object *o = pgl_check_run(L, 1, "noise");
  pg_noise n;
  int status = pg_run_noise(((pgl_run *)o->resource)->run, &n);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_createtable(L, 0, 7);
  pgl_set_integer(L, "small", n.small);
  pgl_set_integer(L, "large", n.large);
  pgl_set_number(L, "small_square", n.small_square);
  pgl_set_number(L, "large_square", n.large_square);
  pgl_set_number(L, "gradient_square", n.gradient_square);
  pgl_set_number(L, "trace", n.trace);
  set_known(L, "scale", n.scale);
  return 1;
}

static const luaL_Reg functions[] = {{"first_order", first_order}, {NULL, NULL}};

void pgl_open_first_order(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
