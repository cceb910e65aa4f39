/* RMS normalisation of each head vector followed by rotary position embedding (Su et al. 2021),
 * half-split: with (l, r) the halves of the normalised vector, (l c - r s, r c + l s). */
#include "bf16.h"
#include "vector.h"

/* x, y [batch*time, heads*head_dim], cosine and sine [time, head_dim/2], rstd [batch*time, heads].
 * y may be x. */
int PG_CPU(qk_norm_rope_forward)(pg_queue *q, pg_dtype type, const void *x, int64_t batch,
                                 int64_t time, int64_t heads, int64_t head_dim, float eps,
                                 const float *cosine, const float *sine, void *y, float *rstd) {
  int64_t half = head_dim / 2, rows = batch * time;
  if (PG_CPU(scratch)(q, head_dim) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, rows *heads *head_dim))
  {
    float *scratch = pg_scratch_of(q, head_dim, omp_get_thread_num());
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const float *c = cosine + i % time * half, *s = sine + i % time * half;
      for (int64_t h = 0; h < heads; h++) {
        int64_t at = (i * heads + h) * head_dim;
        const float *l = pg_run_in(type, x, at, head_dim, scratch), *r = l + half;
        float *yl = pg_run_out(type, y, at, scratch), *yr = yl + half;
        double mean = pg_square_sum(l, head_dim) / (double)head_dim;
        float scale = (float)(1.0 / sqrt(mean + (double)eps));
        rstd[i * heads + h] = scale;
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
          float nl = l[j] * scale, nr = r[j] * scale;
          yl[j] = PG_FMA(nl, c[j], -(nr * s[j]));
          yr[j] = PG_FMA(nr, c[j], nl * s[j]);
        }
        pg_run_store(type, yl, head_dim, y, at);
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* With dn the rotation of dy by the opposite angle, dx = rstd (dn - x rstd^2 mean(dn . x)).
 * The mean needs dn of the whole vector, so dn is computed twice instead of stored; dx may be dy
 * since element pair j is read before it is written. */
int PG_CPU(qk_norm_rope_backward)(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                  const float *rstd, int64_t batch, int64_t time, int64_t heads,
                                  int64_t head_dim, const float *cosine, const float *sine,
                                  void *dx) {
  int64_t half = head_dim / 2, rows = batch * time;
  if (PG_CPU(scratch)(q, 2 * head_dim) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, rows *heads *head_dim))
  {
    float *scratch = pg_scratch_of(q, 2 * head_dim, omp_get_thread_num());
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const float *c = cosine + i % time * half, *s = sine + i % time * half;
      for (int64_t h = 0; h < heads; h++) {
        int64_t at = (i * heads + h) * head_dim;
        const float *dl = pg_run_in(type, dy, at, head_dim, scratch), *dr = dl + half;
        const float *xl = pg_run_in(type, x, at, head_dim, scratch + head_dim), *xr = xl + half;
        float *left = pg_run_out(type, dx, at, scratch), *right = left + half;
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
        pg_run_store(type, left, head_dim, dx, at);
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
