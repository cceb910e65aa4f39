/* core.context: a device with its kernels, queue and accounts. */
#include "bind.h"
#include <limits.h>
#include <string.h>

static void release_context(pgl_object *o) {
  pgl_signals_forget(o->resource);
  pgl_guard_forget(o->resource);
  pg_context_free(o->resource);
}

const pgl_kind pgl_context_kind = {"perigee.context", "context", 0, release_context};

static pg_context *check_context(lua_State *L) {
  return pgl_check(L, 1, &pgl_context_kind)->resource;
}

/* core.context{ device = "auto"|"cpu"|"cuda", device_index = i, threads = n } */
static int context_new(lua_State *L) {
  static const char *const keys[] = {"device", "device_index", "threads", NULL};
  pg_context_options options = {0};
  int64_t threads = 0, index = 0;
  lua_settop(L, 1);
  if (!lua_isnil(L, 1)) {
    pgl_table(L, 1, "context", keys);
    pgl_get_string(L, 1, "context", "device", &options.device);
    pgl_get_integer(L, 1, "context", "device_index", 0, INT_MAX, &index);
    pgl_get_integer(L, 1, "context", "threads", 0, INT_MAX, &threads);
  }
  options.device_index = (int)index;
  options.threads = (int)threads;

  char message[512] = "";
  pg_context *ctx;
  pgl_object *o = pgl_new(L, &pgl_context_kind, NULL);
  int status = pg_context_new(&options, &ctx, message, sizeof message);
  if (status < 0) return pgl_fail_text(L, status, message);
  o->resource = ctx;
  if (!pgl_guard_know(ctx)) return pgl_fail_text(L, PG_ENOMEM, "no memory to know of a context");
  return 1;
}

static int context_device(lua_State *L) {
  lua_pushstring(L, pg_context_device(check_context(L)));
  return 1;
}

/* ctx:describe() -> { name, index, count, cache_bytes, memory_free, memory_total }, in bytes */
static int context_describe(lua_State *L) {
  pg_context *ctx = check_context(L);
  pg_device device;
  int status = pg_context_describe(ctx, &device);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, 0, 5);
  lua_pushstring(L, device.name);
  lua_setfield(L, -2, "name");
  pgl_set_integer(L, "index", device.index);
  pgl_set_integer(L, "count", device.count);
  if (device.cache_bytes) pgl_set_integer(L, "cache_bytes", device.cache_bytes);
  if (device.memory_total) {
    pgl_set_integer(L, "memory_free", device.memory_free);
    pgl_set_integer(L, "memory_total", device.memory_total);
  }
  return 1;
}

/* ctx:available() -> bytes that can still be allocated; nil where that is unknown */
static int context_available(lua_State *L) {
  const int64_t bytes = pg_context_available(check_context(L));
  if (bytes > 0)
    lua_pushinteger(L, bytes);
  else
    lua_pushnil(L);
  return 1;
}

/* ctx:attention{ compute = "fp32"|"bf16", batch, time, heads, head_dim } -> a line, empty where the
 * device has one attention only */
static int context_attention(lua_State *L) {
  static const char *const keys[] = {"compute", "batch", "time", "heads", "head_dim", NULL};
  pg_context *ctx = check_context(L);
  const char *compute = "fp32";
  int64_t sides[4] = {1, 1, 1, 1};
  char text[512] = "";
  pgl_table(L, 2, "attention", keys);
  pgl_get_string(L, 2, "attention", "compute", &compute);
  for (int i = 0; i < 4; i++)
    pgl_need(L, pgl_get_integer(L, 2, "attention", keys[i + 1], 1, INT32_MAX, &sides[i]),
             "attention", keys[i + 1]);
  const bool bf16 = strcmp(compute, "bf16") == 0;
  if (!bf16 && strcmp(compute, "fp32") != 0)
    return luaL_error(L, "attention: compute is \"%s\"; it must be \"fp32\" or \"bf16\"", compute);
  int status =
      pg_context_attention(ctx, bf16, sides[0], sides[1], sides[2], sides[3], text, sizeof text);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushstring(L, text);
  return 1;
}

static int context_threads(lua_State *L) {
  lua_pushinteger(L, pg_context_threads(check_context(L)));
  return 1;
}

static int context_bytes(lua_State *L) {
  lua_pushinteger(L, pg_context_bytes(check_context(L)));
  return 1;
}

static int context_peak_bytes(lua_State *L) {
  lua_pushinteger(L, pg_context_peak_bytes(check_context(L)));
  return 1;
}

static int context_live_tensors(lua_State *L) {
  lua_pushinteger(L, pg_context_live_tensors(check_context(L)));
  return 1;
}

const char *pgl_cpu_level(const pg_context *ctx) {
  const bool cpu = strcmp(ctx->kernels->name, "cpu") == 0;
  return pg_cpu_level(cpu ? ctx->kernels : pg_cpu_kernels(NULL));
}

static int context_cpu_level(lua_State *L) {
  lua_pushstring(L, pgl_cpu_level(check_context(L)));
  return 1;
}

static int context_cancel(lua_State *L) {
  pg_context_cancel(check_context(L));
  return 0;
}

static int context_resume(lua_State *L) {
  pg_context_resume(check_context(L));
  return 0;
}

static int context_cancelled(lua_State *L) {
  lua_pushboolean(L, pg_context_cancelled(check_context(L)));
  return 1;
}

static const luaL_Reg methods[] = {{"device", context_device},
                                   {"describe", context_describe},
                                   {"available", context_available},
                                   {"attention", context_attention},
                                   {"threads", context_threads},
                                   {"bytes", context_bytes},
                                   {"peak_bytes", context_peak_bytes},
                                   {"live_tensors", context_live_tensors},
                                   {"cpu_level", context_cpu_level},
                                   {"profile_start", pgl_profile_start},
                                   {"profile_stop", pgl_profile_stop},
                                   {"cancel", context_cancel},
                                   {"resume", context_resume},
                                   {"cancelled", context_cancelled},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"context", context_new}, {NULL, NULL}};

void pgl_open_context(lua_State *L) {
  pgl_define(L, &pgl_context_kind, methods);
  luaL_setfuncs(L, functions, 0);
  pgl_set_integer(L, "max_threads", PG_MAX_THREADS);
}
