/* Momentum by sums, and the direction that is normalised next, in one pass over g, b and x. The
 * operations, their order and that of the sum of squares are those of the element-wise kernels and
 * of pg_reduce. */
#include "vector.h"
#include <stdlib.h>

/* A run of one matrix; returns the sum of squares of x, 0 without. */
static double advance(float mu, bool nesterov, const float *g, float *b, int64_t n, float *x) {
  if (!x) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) b[i] = mu * b[i] + g[i];
    return 0;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float sum = mu * b[i] + g[i], ahead = mu * sum + g[i];
    b[i] = sum;
    x[i] = nesterov ? ahead : sum;
  }
  return pg_sum_run(x, 1, n, true);
}

int PG_CPU(momentum)(pg_queue *q, double mu, bool nesterov, int64_t count, const float *const *g,
                     float *const *b, int64_t n, float *x, float *norm) {
  const int64_t runs = (n + PG_SUM_RUN - 1) / PG_SUM_RUN;
  double *squares = malloc((size_t)(count * runs) * sizeof *squares + 1);
  if (!squares) return pg_refuse(q, "no memory for %lld sums", (long long)(count * runs));
#pragma omp parallel num_threads(pg_team(q, count *n * 3))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < count * runs; t++) {
      int64_t k = t / runs, i = t % runs * PG_SUM_RUN;
      squares[t] = advance((float)mu, nesterov, g[k] + i, b[k] + i, pg_min64(PG_SUM_RUN, n - i),
                           x ? x + k * n + i : NULL);
    }
    pg_float_mode_restore(mode);
  }
  for (int64_t k = 0; x && k < count; k++) {
    double sum = 0;
    for (int64_t t = k * runs; t < (k + 1) * runs; t++) sum += squares[t];
    norm[k] = (float)sqrt(sum);
  }
  free(squares);
  return 0;
}
