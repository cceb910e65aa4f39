/* RMS normalisation of rows without gains (Zhang and Sennrich 2019), statistics in fp64. */
#include "vector.h"

/* x, y [n,d]: y = x r, r = 1/sqrt(mean(x^2) + eps). y may be x. */
int PG_CPU(rmsnorm_forward)(pg_queue *q, const float *x, int64_t n, int64_t d, float eps, float *y,
                            float *rstd) {
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float *row = x + i * d;
      float *to = y + i * d;
      float r = (float)(1.0 / sqrt(pg_square_sum(row, d) / (double)d + (double)eps));
#pragma omp simd
      for (int64_t j = 0; j < d; j++) to[j] = row[j] * r;
      if (rstd) rstd[i] = r;
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* dx (+)= r (dy - x r^2 mean(dy . x)). dx may be dy when it is overwritten. */
int PG_CPU(rmsnorm_backward)(pg_queue *q, const float *dy, const float *x, const float *rstd,
                             int64_t n, int64_t d, bool add, float *dx) {
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float *dyi = dy + i * d, *xi = x + i * d;
      float *dxi = dx + i * d;
      double r = rstd[i];
      float c = (float)(r * r * r * pg_dot(dyi, xi, d) / (double)d), rf = rstd[i];
      if (add) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dxi[j] += PG_FMA(rf, dyi[j], -(c * xi[j]));
      } else {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) dxi[j] = PG_FMA(rf, dyi[j], -(c * xi[j]));
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
