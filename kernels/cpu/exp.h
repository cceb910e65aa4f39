/* The exponential of the hot loops, which vectorises under `omp simd`. */
#ifndef PG_CPU_EXP_H
#define PG_CPU_EXP_H

#include "cpu.h"
#include <string.h>

#define PG_EXP_LOW -87.33654f /* log(2^-126): below it the result is 0 */
#define PG_EXP_HIGH 88.37626f /* above it the result stays exp(PG_EXP_HIGH) = 2.4e38 */

/* exp(x) within 1.1 ulp, fused or not (tests/unit/kernels_exp_test.c). NaN stays
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

#endif
