/* AdamW (Loshchilov and Hutter 2019): one pass over g, m, v and the target, 28 bytes per weight,
 * 2 more with a copy and 4 more where the increment is kept.
 *
 * The order of operations is that of the element-wise kernels, without contraction, so that
 *   m:lerp_(g, 1 - b1); v:lerp_(g:square(), 1 - b2)
 *   s = (m * c1) * -lr / (sqrt(v * c2) + eps)
 * written from them gives the same bits. */
#include "target.h"
#include <math.h>

typedef struct factors { /* the hyperparameters, each rounded once */
  float keep1, take1, keep2, take2, correction1, correction2, step, eps;
} factors;

static void increments(const factors *f, const float *g, int64_t n, float *m, float *v, float *s) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float mi = f->keep1 * m[i] + f->take1 * g[i];
    float vi = f->keep2 * v[i] + f->take2 * (g[i] * g[i]);
    m[i] = mi;
    v[i] = vi;
    s[i] = f->step * (mi * f->correction1) / (sqrtf(vi * f->correction2) + f->eps);
  }
}

int PG_CPU(adamw)(pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m, float *v,
                  const pg_target *to) {
  double take1 = 1 - h->beta1, take2 = 1 - h->beta2;
  const factors f = {.keep1 = (float)(1 - take1),
                     .take1 = (float)take1,
                     .keep2 = (float)(1 - take2),
                     .take2 = (float)take2,
                     .correction1 = (float)h->correction1,
                     .correction2 = (float)h->correction2,
                     .step = (float)-h->lr,
                     .eps = (float)h->eps};
#pragma omp parallel num_threads(pg_team(q, n * 4))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    float scratch[PG_RUN];
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t i = begin; i < end; i += PG_RUN) {
      int64_t run = pg_min64(end - i, PG_RUN);
      float *s = pg_target_run(to, i, scratch);
      increments(&f, g + i, run, m + i, v + i, s);
      pg_target_apply(to, i, run, s);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
