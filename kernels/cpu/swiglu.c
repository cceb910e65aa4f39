/* The gated unit y = silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). */
#include "bf16.h"
#include "vector.h"
#include <omp.h>

int PG_CPU(swiglu_forward)(pg_queue *q, pg_dtype type, const void *gate, const void *up, int64_t n,
                           void *y) {
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    float scratch[2][PG_RUN];
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t at = begin; at < end; at += PG_RUN) {
      int64_t count = pg_min64(PG_RUN, end - at);
      const float *g = pg_run_in(type, gate, at, count, scratch[0]);
      const float *u = pg_run_in(type, up, at, count, scratch[1]);
      float *out = pg_run_out(type, y, at, scratch[0]);
#pragma omp simd
      for (int64_t i = 0; i < count; i++) out[i] = g[i] / (1.0f + pg_expf(-g[i])) * u[i];
      pg_run_store(type, out, count, y, at);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* With p = 1/(1 + exp(-g)): dup = dy g p, dgate = dy up p (1 + g (1 - p)). */
int PG_CPU(swiglu_backward)(pg_queue *q, pg_dtype type, const void *dy, const void *gate,
                            const void *up, int64_t n, void *dgate, void *dup) {
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    float scratch[3][PG_RUN];
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t at = begin; at < end; at += PG_RUN) {
      int64_t count = pg_min64(PG_RUN, end - at);
      const float *d = pg_run_in(type, dy, at, count, scratch[0]);
      const float *g = pg_run_in(type, gate, at, count, scratch[1]);
      const float *u = pg_run_in(type, up, at, count, scratch[2]);
      float *dg = pg_run_out(type, dgate, at, scratch[1]);
      float *du = pg_run_out(type, dup, at, scratch[2]);
      /* Element i is read before it is written, so in place is safe in vectors too. */
#pragma omp simd
      for (int64_t i = 0; i < count; i++) {
        float gi = g[i], ui = u[i], di = d[i];
        float p = 1.0f / (1.0f + pg_expf(-gi));
        du[i] = di * (gi * p);
        dg[i] = di * ui * p * PG_FMA(gi, 1.0f - p, 1.0f);
      }
      pg_run_store(type, dg, count, dgate, at);
      pg_run_store(type, du, count, dup, at);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
