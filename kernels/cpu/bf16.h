/* Activations of either compute type for kernels that compute in fp32.
 *
 * A kernel takes a run of elements with pg_run_in: in F32 the tensor itself, in BF16 the values
 * widened into scratch. It computes into pg_run_out, and pg_run_store rounds what was computed into
 * the tensor. So the mathematics is written once, and F32 costs nothing. Types are those of the
 * call, and offsets are in elements. */
#ifndef PG_CPU_BF16_H
#define PG_CPU_BF16_H

#include "cpu.h"
#include <string.h>

/* Elements that element-wise kernels take at once: they stay in the first-level cache. */
#define PG_RUN 1024

static inline size_t pg_type_size(pg_dtype type) {
  return type == PG_BF16 ? 2 : 4;
}

/* Integer operations throughout, so that denormals and the payloads of NaN do not depend on the
 * thread's float mode. */
static inline float pg_from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
/* To nearest, ties to even; what exceeds the largest bf16 by half a unit becomes infinite. A NaN
 * stays one: its upper bits, made quiet, since rounding could carry it into infinity. */
static inline uint16_t pg_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  uint32_t quiet = bits >> 16 | 0x40u;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline void pg_widen(const uint16_t *from, int64_t n, float *to) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) to[i] = pg_from_bf16(from[i]);
}
static inline void pg_narrow(const float *from, int64_t n, uint16_t *to) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) to[i] = pg_to_bf16(from[i]);
}

/* Elements [at, at + n) of x as fp32. */
static inline const float *pg_run_in(pg_dtype type, const void *x, int64_t at, int64_t n,
                                     float *scratch) {
  if (type == PG_F32) return (const float *)x + at;
  pg_widen((const uint16_t *)x + at, n, scratch);
  return scratch;
}
/* Where to compute elements from `at` on. */
static inline float *pg_run_out(pg_dtype type, void *x, int64_t at, float *scratch) {
  return type == PG_F32 ? (float *)x + at : scratch;
}
/* Store what was computed at pg_run_out. */
static inline void pg_run_store(pg_dtype type, const float *computed, int64_t n, void *x,
                                int64_t at) {
  if (type == PG_BF16) pg_narrow(computed, n, (uint16_t *)x + at);
}

#endif
