/* Scalar building blocks that vectorise when used in a loop under `omp simd`: the exponential, and
 * dot products with fixed accumulation. */
#ifndef PG_CPU_VECTOR_H
#define PG_CPU_VECTOR_H

#include "cpu.h"
#include <math.h>
#include <string.h>

#define PG_EXP_LOW -87.33654f /* log(2^-126): below it the result is 0 */
#define PG_EXP_HIGH 88.37626f /* above it the result stays exp(PG_EXP_HIGH) = 2.4e38 */

/* exp(x) within 1 ulp with fused multiply-adds and 2 ulp without (kernels_exp_test). NaN stays
 * NaN. x = n log 2 + r with |r| <= log(2)/2 and exp(r) = 1 + r + r^2 Q(r); Q is the Chebyshev
 * interpolant of degree 4, which is off by 0.13 ulp. Adding 1.5 * 2^23 rounds to the integer n and
 * leaves it in the low bits, from where it is shifted into the exponent of 2^n. log 2 is split in
 * two so that n * high is exact. */
static inline float pg_expf(float x) {
  const float shift = 12582912.0f;
  float c = x < PG_EXP_LOW ? PG_EXP_LOW : x;
  c = c > PG_EXP_HIGH ? PG_EXP_HIGH : c;
  float shifted = c * 1.44269504f + shift;
  float n = shifted - shift;
  float r = PG_FMA(n, -0.693359375f, c);
  r = PG_FMA(n, 2.12194440e-4f, r);
  float q = 0.00139261835877f;
  q = PG_FMA(q, r, 0.00836317905272f);
  q = PG_FMA(q, r, 0.0416665546172f);
  q = PG_FMA(q, r, 0.166665769897f);
  q = PG_FMA(q, r, 0.5f);
  float y = PG_FMA(q, r * r, r) + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits << 23) + 0x3f800000u;
  float power;
  memcpy(&power, &bits, 4);
  return x < PG_EXP_LOW ? 0.0f : y * power;
}

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
