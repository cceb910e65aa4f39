/* Softmax cross entropy over rows of logits with its gradient in place, and the range of rows. */
#include "bf16.h"
#include "vector.h"

/* Exponentials are summed in fp32 over this many columns and those sums in fp64: the error of the
 * loss then stays near that of one exponential however large the vocabulary is. */
#define SUM_BLOCK 1024

/* sum_j exp(scale z_j - max); with `keep` the exponentials replace z. */
static double exponentials(float *z, int64_t n, float scale, float max, bool keep) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += SUM_BLOCK) {
    int64_t end = pg_min64(n, begin + SUM_BLOCK);
    float sum = 0;
    if (keep) {
#pragma omp simd reduction(+ : sum)
      for (int64_t j = begin; j < end; j++) {
        float e = pg_expf(z[j] * scale - max);
        z[j] = e;
        sum += e;
      }
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t j = begin; j < end; j++) sum += pg_expf(z[j] * scale - max);
    }
    total += sum;
  }
  return total;
}

/* One row: the loss, and in place (softmax - onehot) * scale * logit_scale. A non-finite logit
 * gives a non-finite loss: the maximum ignores NaN, the sum of exponentials does not. */
static float row_loss(float *z, int64_t vocab, int32_t target, float logit_scale, float scale,
                      bool gradient) {
  float max = (logit_scale < 0 ? pg_min_run(z, vocab) : pg_max_run(z, vocab)) * logit_scale;
  double at_target = (double)(z[target] * logit_scale);
  double sum = exponentials(z, vocab, logit_scale, max, gradient);
  if (gradient) {
    double factor = (double)scale * logit_scale;
    float f = (float)(factor / sum);
    float own = (float)(factor * (z[target] / sum - 1.0));
#pragma omp simd
    for (int64_t j = 0; j < vocab; j++) z[j] *= f;
    z[target] = own;
  }
  return (float)(log(sum) + ((double)max - at_target));
}

/* The row's floats rounded to bf16, at its beginning. A run is read before the narrower one is
 * written over its first half and what has been read. */
static void narrow_in_place(float *row, int64_t n) {
  float wide[PG_RUN];
  uint16_t narrow[PG_RUN];
  for (int64_t at = 0; at < n; at += PG_RUN) {
    int64_t count = pg_min64(PG_RUN, n - at);
    memcpy(wide, row + at, (size_t)count * sizeof *wide);
    pg_narrow(wide, count, narrow);
    memcpy((char *)row + 2 * at, narrow, (size_t)count * sizeof *narrow);
  }
}

int PG_CPU(cross_entropy)(pg_queue *q, pg_dtype type, float *logits, int64_t n, int64_t vocab,
                          int64_t ld, const int32_t *targets, float logit_scale, float scale,
                          bool gradient, float *loss) {
#pragma omp parallel num_threads(pg_team(q, n *vocab * 4))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      loss[i] = row_loss(logits + i * ld, vocab, targets[i], logit_scale, scale, gradient);
      if (gradient && type == PG_BF16) narrow_in_place(logits + i * ld, vocab);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

/* Columns read three times while they are in the cache. */
#define RANGE_BLOCK 4096

/* out[i] = max_j z_ij - min_j z_ij, NaN when an element is not finite. */
int PG_CPU(row_range)(pg_queue *q, const float *z, int64_t n, int64_t vocab, int64_t ld,
                      float *out) {
#pragma omp parallel for num_threads(pg_team(q, n *vocab)) schedule(static)
  for (int64_t i = 0; i < n; i++) {
    float max = -INFINITY, min = INFINITY, bad = 0;
    for (int64_t j = 0; j < vocab; j += RANGE_BLOCK) {
      const float *run = z + i * ld + j;
      int64_t count = pg_min64(RANGE_BLOCK, vocab - j);
      max = fmaxf(max, pg_max_run(run, count));
      min = fminf(min, pg_min_run(run, count));
      bad += pg_not_finite(run, count);
    }
    out[i] = max - min + bad;
  }
  return 0;
}
