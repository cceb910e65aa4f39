/* fp32 arithmetic of the element-wise kernels: one rounding per operation, never contracted, and
 * numbers below 2^-126 count as 0 with their sign, as input and as result, whatever flags the
 * compiler was given. That is what the CPU kernels' flush-to-zero mode does (kernels/cpu/cpu.h), so
 * an optimizer gives the same bits here and there, and written from these operations or in C. The
 * two may differ where an exact result lies within 2^-24 of 2^-126 itself: a CPU flushes before
 * such a result rounds up to 2^-126.
 *
 * Operations that only move or select bits (negation, absolute value, minimum, maximum, sign,
 * copies) keep small numbers; comparisons see them as 0. `reduce`, `sum` and `diameter` work in
 * fp64 and keep them too. */
#ifndef PG_CUDA_FLUSH_CUH
#define PG_CUDA_FLUSH_CUH

#include "cuda.cuh"

static __device__ inline float pg_flush(float x) {
  unsigned bits = __float_as_uint(x);
  return bits & 0x7f800000u ? x : __uint_as_float(bits & 0x80000000u);
}
static __device__ inline float pg_add(float x, float y) {
  return pg_flush(__fadd_rn(pg_flush(x), pg_flush(y)));
}
static __device__ inline float pg_sub(float x, float y) {
  return pg_flush(__fsub_rn(pg_flush(x), pg_flush(y)));
}
static __device__ inline float pg_mul(float x, float y) {
  return pg_flush(__fmul_rn(pg_flush(x), pg_flush(y)));
}
static __device__ inline float pg_div(float x, float y) {
  return pg_flush(__fdiv_rn(pg_flush(x), pg_flush(y)));
}
static __device__ inline float pg_root(float x) {
  return __fsqrt_rn(pg_flush(x));
}

#endif
