/* AdamW's increment (Loshchilov and Hutter 2019), one pass over g, m, v, s.
 *
 * The order of operations is that of the element-wise kernels, without contraction, so that
 *   m:lerp_(g, 1 - b1); v:lerp_(g:square(), 1 - b2)
 *   s = (m * c1) * -lr / (sqrt(v * c2) + eps)
 * written from them gives the same bits. */
#include "cpu.h"
#include <math.h>
#include <omp.h>

int PG_CPU(adamw_increment)(pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m,
                            float *v, float *s) {
  double take1 = 1 - h->beta1, take2 = 1 - h->beta2;
  float a1 = (float)take1, k1 = (float)(1 - take1), a2 = (float)take2, k2 = (float)(1 - take2);
  float c1 = (float)h->correction1, c2 = (float)h->correction2;
  float step = (float)-h->lr, eps = (float)h->eps;
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      float mi = k1 * m[i] + a1 * g[i];
      float vi = k2 * v[i] + a2 * (g[i] * g[i]);
      m[i] = mi;
      v[i] = vi;
      s[i] = step * (mi * c1) / (sqrtf(vi * c2) + eps);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
