/* Increments on their way to a pg_target, in the arithmetic of flush.cuh: w <- keep w + s with one
 * rounding of the product and one of the sum. */
#ifndef PG_CUDA_TARGET_CUH
#define PG_CUDA_TARGET_CUH

#include "flush.cuh"

/* A pg_target as a kernel gets it. Without padding, whose bits could look like a pointer to the
 * emulation. */
struct pg_cuda_target {
  float *increment, *value;
  pg_bf16 *copy;
  float keep;
  int wide;         /* whether four elements at a time are aligned everywhere */
  int64_t cautious; /* 0 or 1 */
};

static inline pg_cuda_target pg_cuda_target_of(const pg_target *to) {
  pg_cuda_target t;
  t.increment = to->increment, t.value = to->value, t.copy = (pg_bf16 *)to->copy;
  t.keep = (float)to->keep, t.cautious = to->cautious;
  t.wide = pg_wide_aligned(t.increment) && pg_wide_aligned(t.value) && ((uintptr_t)t.copy & 7) == 0;
  return t;
}

static __device__ inline float pg_moved(const pg_cuda_target &t, float w, float s) {
  const bool decays = !t.cautious || pg_mul(s, w) < 0;
  return pg_add(decays ? pg_mul(t.keep, w) : w, s);
}

static __device__ inline void pg_deliver(const pg_cuda_target &t, int64_t i, float s) {
  if (t.increment) t.increment[i] = s;
  if (!t.value) return;
  const float w = pg_moved(t, t.value[i], s);
  t.value[i] = w;
  if (t.copy) pg_store(t.copy + i, w);
}

/* Elements [at, at + 4), in two halves, so that a kernel can ask for the weights together with the
 * rest of what it reads. */
static __device__ inline void pg_fetch_quad(const pg_cuda_target &t, int64_t at, float (&w)[4]) {
  if (t.value) pg_load_wide(t.value + at, w);
}
static __device__ inline void pg_deliver_quad(const pg_cuda_target &t, int64_t at,
                                              const float (&s)[4], float (&w)[4]) {
  if (t.increment) pg_store_wide(t.increment + at, s);
  if (!t.value) return;
#pragma unroll
  for (int e = 0; e < 4; e++) w[e] = pg_moved(t, w[e], s[e]);
  pg_store_wide(t.value + at, w);
  if (t.copy) pg_store_quad(t.copy + at, w);
}

#endif
