/* Conversion between fp32 and bf16: to nearest, ties to even; small numbers are kept. */
#include "cuda.cuh"

static __global__ void narrow(const float *from, int64_t n, bool wide, pg_bf16 *to) {
  for (PG_STRIDE(run, (n + 7) / 8)) {
    const int64_t at = run * 8;
    if (wide && at + 8 <= n) {
      float low[4], high[4], all[8];
      pg_load_wide(from + at, low);
      pg_load_wide(from + at + 4, high);
#pragma unroll
      for (int e = 0; e < 4; e++) all[e] = low[e], all[e + 4] = high[e];
      pg_store_wide(to + at, all);
    } else {
      for (int64_t i = at; i < n && i < at + 8; i++) pg_store(to + i, from[i]);
    }
  }
}

static __global__ void widen(const pg_bf16 *from, int64_t n, bool wide, float *to) {
  for (PG_STRIDE(run, (n + 7) / 8)) {
    const int64_t at = run * 8;
    if (wide && at + 8 <= n) {
      float low[4], high[4], all[8];
      pg_load_wide(from + at, all);
#pragma unroll
      for (int e = 0; e < 4; e++) low[e] = all[e], high[e] = all[e + 4];
      pg_store_wide(to + at, low);
      pg_store_wide(to + at + 4, high);
    } else {
      for (int64_t i = at; i < n && i < at + 8; i++) to[i] = pg_load(from + i);
    }
  }
}

int pg_cuda_convert(pg_queue *q, pg_dtype from_type, const void *from, pg_dtype to_type, void *to,
                    int64_t n) {
  const bool known =
      (from_type == PG_F32 || from_type == PG_BF16) && (to_type == PG_F32 || to_type == PG_BF16);
  const bool wide = (((uintptr_t)from | (uintptr_t)to) & 15) == 0;
  const dim3 grid = pg_stride_grid(q, pg_blocks(n, 8));
  if (!known) return pg_cuda_refuse(q, "conversion is between F32 and BF16");
  if (n == 0) return 0;
  if (from_type == to_type)
    return pg_cuda_copy(q, to, from, (size_t)n * (to_type == PG_BF16 ? 2 : 4));
  if (to_type == PG_BF16)
    PG_CUDA_LAUNCH(q, narrow, grid, dim3(PG_CUDA_BLOCK), 0, (const float *)from, n, wide,
                   (pg_bf16 *)to);
  else
    PG_CUDA_LAUNCH(q, widen, grid, dim3(PG_CUDA_BLOCK), 0, (const pg_bf16 *)from, n, wide,
                   (float *)to);
  return 0;
}
