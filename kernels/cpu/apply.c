/* Adding an increment to a parameter, decoupled weight decay first. */
#include "cpu.h"
#include <omp.h>

/* w <- keep w + s: one rounding of the product, one of the sum. */
int PG_CPU(apply)(pg_queue *q, double keep, const float *s, int64_t n, float *w) {
  float k = (float)keep;
#pragma omp parallel num_threads(pg_team(q, n))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) w[i] = k * w[i] + s[i];
    pg_float_mode_restore(mode);
  }
  return 0;
}
