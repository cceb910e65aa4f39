/* Vectorised building blocks: extremes, finiteness, and sums of products in fp64. */
#ifndef PG_CPU_VECTOR_H
#define PG_CPU_VECTOR_H

#include "cpu.h"
#include "exp.h"
#include <math.h>
#include <string.h>

/* Extremes over explicit lanes, since clang 14 cannot vectorise a max reduction that respects NaN;
 * 64 of them, since gcc 12 unrolls shorter inner loops into scalars. NaN is ignored; an empty run
 * gives -inf or inf. */
#define PG_LANES 64
#define PG_EXTREME_RUN(name, start, beats)                                                         \
  static inline float name(const float *x, int64_t n) {                                            \
    float lane[PG_LANES];                                                                          \
    int64_t k = 0;                                                                                 \
    for (int l = 0; l < PG_LANES; l++) lane[l] = start;                                            \
    for (; k + PG_LANES <= n; k += PG_LANES) {                                                     \
      _Pragma("omp simd") for (int l = 0; l < PG_LANES; l++) lane[l] =                             \
          x[k + l] beats lane[l] ? x[k + l] : lane[l];                                             \
    }                                                                                              \
    for (int l = 0; k < n; k++, l++) lane[l] = x[k] beats lane[l] ? x[k] : lane[l];                \
    for (int l = 0; l < 16; l++) {                                                                 \
      float a = lane[l + 16] beats lane[l] ? lane[l + 16] : lane[l];                               \
      float b = lane[l + 48] beats lane[l + 32] ? lane[l + 48] : lane[l + 32];                     \
      lane[l] = b beats a ? b : a;                                                                 \
    }                                                                                              \
    for (int w = 8; w; w /= 2)                                                                     \
      for (int l = 0; l < w; l++) lane[l] = lane[l + w] beats lane[l] ? lane[l + w] : lane[l];     \
    return lane[0];                                                                                \
  }
PG_EXTREME_RUN(pg_max_run, -INFINITY, >)
PG_EXTREME_RUN(pg_min_run, INFINITY, <)

/* 0 when every element is finite, else NaN. */
static inline float pg_not_finite(const float *x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] - x[i];
  return sum;
}

/* Elements of one run when everything is reduced; the sums of the runs are added in order. */
#define PG_SUM_RUN 4096

/* Sum of n elements or of their squares, whose order no level and no thread count changes: element
 * k goes to lane k % 16, and the lanes are added in halves (8, 4, 2, 1 apart). */
static inline double pg_sum_run(const float *x, int64_t stride, int64_t n, bool square) {
  enum { LANES = 16 };
  double lane[LANES] = {0};
  int64_t k = 0;
  if (stride == 1 && square) {
    for (; k + LANES <= n; k += LANES)
      for (int l = 0; l < LANES; l++) lane[l] += (double)x[k + l] * (double)x[k + l];
  } else if (stride == 1) {
    for (; k + LANES <= n; k += LANES)
      for (int l = 0; l < LANES; l++) lane[l] += (double)x[k + l];
  }
  for (; k < n; k++) {
    double value = (double)x[k * stride];
    lane[k % LANES] += square ? value * value : value;
  }
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) lane[l] += lane[l + width];
  return lane[0];
}

/* sum of x^2 in any order: products of two fp32 numbers are exact in fp64. */
static inline double pg_square_sum(const float *x, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
  return sum;
}

static inline double pg_dot(const float *x, const float *y, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * y[i];
  return sum;
}

#endif
