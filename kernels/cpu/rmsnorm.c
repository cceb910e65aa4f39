/* RMS normalisation of rows without gains (Zhang and Sennrich 2019), statistics in fp64. */
#include "bf16.h"
#include "vector.h"

/* x, y [n,d]: y = x r, r = 1/sqrt(mean(x^2) + eps). y may be x. */
int PG_CPU(rmsnorm_forward)(pg_queue *q, pg_dtype type, const void *x, int64_t n, int64_t d,
                            float eps, void *y, float *rstd) {
  if (PG_CPU(scratch)(q, d) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    float *scratch = pg_scratch_of(q, d, omp_get_thread_num());
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float *row = pg_run_in(type, x, i * d, d, scratch);
      float *to = pg_run_out(type, y, i * d, scratch);
      float r = (float)(1.0 / sqrt(pg_square_sum(row, d) / (double)d + (double)eps));
#pragma omp simd
      for (int64_t j = 0; j < d; j++) to[j] = row[j] * r;
      pg_run_store(type, to, d, y, i * d);
      if (rstd) rstd[i] = r;
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* dx (+)= r (dy - x r^2 mean(dy . x)). dx may be dy when it is overwritten. */
int PG_CPU(rmsnorm_backward)(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                             const float *rstd, int64_t n, int64_t d, bool add, void *dx) {
  if (PG_CPU(scratch)(q, 3 * d) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    float *scratch = pg_scratch_of(q, 3 * d, omp_get_thread_num());
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float *dyi = pg_run_in(type, dy, i * d, d, scratch);
      const float *xi = pg_run_in(type, x, i * d, d, scratch + d);
      float *dxi = pg_run_out(type, dx, i * d, scratch + 2 * d);
      double r = rstd[i];
      float c = (float)(r * r * r * pg_dot(dyi, xi, d) / (double)d), rf = rstd[i];
      if (add) {
        pg_run_in(type, dx, i * d, d, scratch + 2 * d);
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dxi[j] += PG_FMA(rf, dyi[j], -(c * xi[j]));
      } else {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dxi[j] = PG_FMA(rf, dyi[j], -(c * xi[j]));
      }
      pg_run_store(type, dxi, d, dx, i * d);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
