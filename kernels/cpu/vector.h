/* Vectorised building blocks: extremes, finiteness, and sums of products in fp64. */
#ifndef PG_CPU_VECTOR_H
#define PG_CPU_VECTOR_H

#include "cpu.h"
#include "exp.h"
#include <math.h>
#include <string.h>

/* Extremes over explicit lanes: clang 14 cannot vectorise a max reduction that respects NaN. NaN is
 * ignored; an empty run gives -inf or inf. */
#define PG_LANES 16
static inline float pg_max_run(const float *x, int64_t n) {
  float lane[PG_LANES];
  int64_t k = 0;
  for (int l = 0; l < PG_LANES; l++) lane[l] = -INFINITY;
  for (; k + PG_LANES <= n; k += PG_LANES)
    for (int l = 0; l < PG_LANES; l++) lane[l] = x[k + l] > lane[l] ? x[k + l] : lane[l];
  for (; k < n; k++) lane[0] = x[k] > lane[0] ? x[k] : lane[0];
  for (int l = 1; l < PG_LANES; l++) lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
  return lane[0];
}
static inline float pg_min_run(const float *x, int64_t n) {
  float lane[PG_LANES];
  int64_t k = 0;
  for (int l = 0; l < PG_LANES; l++) lane[l] = INFINITY;
  for (; k + PG_LANES <= n; k += PG_LANES)
    for (int l = 0; l < PG_LANES; l++) lane[l] = x[k + l] < lane[l] ? x[k + l] : lane[l];
  for (; k < n; k++) lane[0] = x[k] < lane[0] ? x[k] : lane[0];
  for (int l = 1; l < PG_LANES; l++) lane[0] = lane[l] < lane[0] ? lane[l] : lane[0];
  return lane[0];
}

/* 0 when every element is finite, else NaN. */
static inline float pg_not_finite(const float *x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] - x[i];
  return sum;
}

/* sum of x^2: products of two fp32 numbers are exact in fp64. */
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
