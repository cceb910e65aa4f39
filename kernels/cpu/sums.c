/* Sums that decide (fp64), the norm and the clip factor. */
#include "vector.h"
#include <omp.h>

/* A vector is cut into at most this many blocks, by its length alone; the blocks' sums are added
 * in order, so the result does not depend on the thread count. */
#define MAX_BLOCKS 4096
#define MIN_BLOCK 16384

int PG_CPU(sum)(pg_queue *q, const float *x, int64_t n, bool square, double *out) {
  double partial[MAX_BLOCKS];
  int64_t size = pg_max64(MIN_BLOCK, (n + MAX_BLOCKS - 1) / MAX_BLOCKS);
  int64_t blocks = (n + size - 1) / size;
#pragma omp parallel for num_threads(pg_team(q, n)) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    const float *from = x + b * size;
    int64_t count = pg_min64(size, n - b * size);
    if (square) {
      partial[b] = pg_square_sum(from, count);
    } else {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; i++) sum += from[i];
      partial[b] = sum;
    }
  }
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) total += partial[b];
  *out = total;
  return 0;
}

int PG_CPU(clip_factor)(pg_queue *q, const double *sums, int64_t count, double max_norm,
                        pg_clip *out) {
  (void)q;
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += sums[i];
  out->norm = sqrt(total);
  out->finite = isfinite(out->norm) ? 1 : 0;
  out->factor = isinf(max_norm) ? 1.0f : (float)fmin(1.0, max_norm / (out->norm + 1e-6));
  return 0;
}

int PG_CPU(clip_apply)(pg_queue *q, const pg_clip *clip, int64_t n, float *x) {
  float factor = clip->factor;
  if (!clip->finite || factor == 1.0f) return 0;
#pragma omp parallel num_threads(pg_team(q, n))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) x[i] *= factor;
    pg_float_mode_restore(mode);
  }
  return 0;
}
