/* Measurements for perigee bench (core/bench.h). */
#include "../../core/bench.h"
#include "bind.h"
#include <stdlib.h>
#include <string.h>

static const char *const type_names[2] = {"fp32", "bf16"};

/* core.bench_peak(ctx) -> { bytes_per_second, copy_bytes, fp32 = { flops_per_second, product },
 * bf16 = ... }; product is nil where a loop in registers was measured */
static int bench_peak(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  pg_peak peak;
  int status = pg_bench_peak(ctx, &peak);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, 0, 4);
  pgl_set_number(L, "bytes_per_second", peak.bytes_per_second);
  pgl_set_integer(L, "copy_bytes", peak.copy_bytes);
  for (int t = 0; t < 2; t++) {
    lua_createtable(L, 0, 2);
    pgl_set_number(L, "flops_per_second", peak.flops_per_second[t]);
    if (peak.product[t]) pgl_set_integer(L, "product", peak.product[t]);
    lua_setfield(L, -2, type_names[t]);
  }
  return 1;
}

/* core.bench_kernels(ctx, model, compute, batch) -> list of { name, shape, type, seconds, repeats,
 * bytes, flops } */
static int bench_kernels(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  pg_bench_sizes sizes = {0};
  pg_kernel_time *times = NULL;
  size_t count;
  pgl_read_config(L, 2, &sizes.config);
  sizes.compute = strcmp(pgl_string(L, 3, "compute"), "bf16") == 0 ? PG_BF16 : PG_F32;
  sizes.batch = pgl_integer(L, 4, "batch", 1, INT32_MAX / sizes.config.context);
  void **box = pgl_own(L, free);
  int status = pg_bench_kernels(ctx, &sizes, &times, &count);
  *box = times;
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, (int)count, 0);
  for (size_t i = 0; i < count; i++) {
    const pg_kernel_time *time = &times[i];
    lua_createtable(L, 0, 7);
    pgl_set_string(L, "name", time->operation);
    pgl_set_string(L, "shape", time->shape);
    pgl_set_string(L, "type", type_names[time->type == PG_BF16]);
    pgl_set_number(L, "seconds", time->seconds);
    pgl_set_integer(L, "repeats", time->repeats);
    pgl_set_number(L, "bytes", time->bytes);
    pgl_set_number(L, "flops", time->flops);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  pgl_disown(box);
  return 1;
}

static const luaL_Reg functions[] = {
    {"bench_peak", bench_peak}, {"bench_kernels", bench_kernels}, {NULL, NULL}};

void pgl_open_bench(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
