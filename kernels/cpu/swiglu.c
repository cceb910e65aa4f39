/* The gated unit y = silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). */
#include "vector.h"
#include <omp.h>

int PG_CPU(swiglu_forward)(pg_queue *q, const float *gate, const float *up, int64_t n, float *y) {
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      float g = gate[i];
      y[i] = g / (1.0f + pg_expf(-g)) * up[i];
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* With p = 1/(1 + exp(-g)): dup = dy g p, dgate = dy up p (1 + g (1 - p)). */
int PG_CPU(swiglu_backward)(pg_queue *q, const float *dy, const float *gate, const float *up,
                            int64_t n, float *dgate, float *dup) {
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
    /* Element i is read before it is written, so in place is safe in vectors too. */
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      float g = gate[i], u = up[i], d = dy[i];
      float p = 1.0f / (1.0f + pg_expf(-g));
      dup[i] = d * (g * p);
      dgate[i] = d * u * p * PG_FMA(g, 1.0f - p, 1.0f);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
