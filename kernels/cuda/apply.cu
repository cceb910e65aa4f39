/* Adding an increment to a parameter, decoupled weight decay first, and its copy in bf16. */
#include "flush.cuh"

/* w <- keep w + s: one rounding of the product, one of the sum. */
static __global__ void add_increments(float keep, const float *s, int64_t n, bool wide, float *w,
                                      pg_bf16 *copy) {
  for (PG_STRIDE(quad, (n + 3) / 4)) {
    const int64_t at = quad * 4;
    float si[4], wi[4];
    if (wide && at + 4 <= n) {
      pg_load_wide(s + at, si);
      pg_load_wide(w + at, wi);
#pragma unroll
      for (int e = 0; e < 4; e++) wi[e] = pg_add(pg_mul(keep, wi[e]), si[e]);
      pg_store_wide(w + at, wi);
      if (copy) {
        *reinterpret_cast<uint2 *>(copy + at) =
            make_uint2(pg_bf16_bits(wi[0]) | pg_bf16_bits(wi[1]) << 16,
                       pg_bf16_bits(wi[2]) | pg_bf16_bits(wi[3]) << 16);
      }
    } else {
      for (int64_t i = at; i < n && i < at + 4; i++) {
        w[i] = pg_add(pg_mul(keep, w[i]), s[i]);
        if (copy) pg_store(copy + i, w[i]);
      }
    }
  }
}

int pg_cuda_apply(pg_queue *q, double keep, const float *s, int64_t n, float *w, uint16_t *copy) {
  const bool wide = pg_wide_aligned(s) && pg_wide_aligned(w) && ((uintptr_t)copy & 7) == 0;
  if (n == 0) return 0;
  PG_CUDA_LAUNCH(q, add_increments, pg_stride_grid(q, pg_blocks(n, 4)), dim3(PG_CUDA_BLOCK), 0,
                 (float)keep, s, n, wide, w, (pg_bf16 *)copy);
  return 0;
}
