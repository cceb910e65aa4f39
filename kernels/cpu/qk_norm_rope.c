/* RMS normalisation of each head vector followed by rotary position embedding (Su et al. 2021),
 * half-split: with (l, r) the halves of the normalised vector, (l c - r s, r c + l s). */
#include "vector.h"

/* x, y [batch*time, heads*head_dim], cosine and sine [time, head_dim/2], rstd [batch*time, heads].
 * y may be x. */
int PG_CPU(qk_norm_rope_forward)(pg_queue *q, const float *x, int64_t batch, int64_t time,
                                 int64_t heads, int64_t head_dim, float eps, const float *cosine,
                                 const float *sine, float *y, float *rstd) {
  int64_t half = head_dim / 2, rows = batch * time;
#pragma omp parallel num_threads(pg_team(q, rows *heads *head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const float *c = cosine + i % time * half, *s = sine + i % time * half;
      for (int64_t h = 0; h < heads; h++) {
        const float *l = x + (i * heads + h) * head_dim, *r = l + half;
        float *yl = y + (i * heads + h) * head_dim, *yr = yl + half;
        double mean = pg_square_sum(l, head_dim) / (double)head_dim;
        float scale = (float)(1.0 / sqrt(mean + (double)eps));
        rstd[i * heads + h] = scale;
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
          float nl = l[j] * scale, nr = r[j] * scale;
          yl[j] = PG_FMA(nl, c[j], -(nr * s[j]));
          yr[j] = PG_FMA(nr, c[j], nl * s[j]);
        }
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* With dn the rotation of dy by the opposite angle, dx = rstd (dn - x rstd^2 mean(dn . x)).
 * The mean needs dn of the whole vector, so dn is computed twice instead of stored; dx may be dy
 * since element pair j is read before it is written. */
int PG_CPU(qk_norm_rope_backward)(pg_queue *q, const float *dy, const float *x, const float *rstd,
                                  int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                                  const float *cosine, const float *sine, float *dx) {
  int64_t half = head_dim / 2, rows = batch * time;
#pragma omp parallel num_threads(pg_team(q, rows *heads *head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const float *c = cosine + i % time * half, *s = sine + i % time * half;
      for (int64_t h = 0; h < heads; h++) {
        int64_t at = (i * heads + h) * head_dim;
        const float *dl = dy + at, *dr = dl + half, *xl = x + at, *xr = xl + half;
        float *left = dx + at, *right = left + half;
        double dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < half; j++) {
          float nl = PG_FMA(dl[j], c[j], dr[j] * s[j]);
          float nr = PG_FMA(dr[j], c[j], -(dl[j] * s[j]));
          dot += (double)nl * xl[j] + (double)nr * xr[j];
        }
        float k = rstd[i * heads + h];
        float m = (float)((double)k * k * k * dot / (double)head_dim);
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
          float nl = PG_FMA(dl[j], c[j], dr[j] * s[j]);
          float nr = PG_FMA(dr[j], c[j], -(dl[j] * s[j]));
          left[j] = PG_FMA(k, nl, -(m * xl[j]));
          right[j] = PG_FMA(k, nr, -(m * xr[j]));
        }
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
