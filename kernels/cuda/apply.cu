/* Scaled matrices to their targets, many in one launch: a backbone has hundreds of small ones. */
#include "target.cuh"

#include <string.h>

/* The targets of one launch travel with its arguments. */
static constexpr int MOST = 64;
struct targets {
  pg_cuda_target to[MOST];
};

/* A column of blocks for each matrix. */
template <class T>
static __global__ void apply(float factor, const T *x, int64_t n, bool wide, targets all) {
  const pg_cuda_target to = all.to[blockIdx.y];
  x += blockIdx.y * n;
  wide = wide && to.wide;
  for (PG_STRIDE(quad, (n + 3) / 4)) {
    const int64_t at = quad * 4;
    float si[4], wi[4];
    if (wide && at + 4 <= n) {
      pg_load_quad(x + at, si);
      pg_fetch_quad(to, at, wi);
#pragma unroll
      for (int e = 0; e < 4; e++) si[e] = pg_mul(factor, si[e]);
      pg_deliver_quad(to, at, si, wi);
    } else {
      for (int64_t i = at; i < n && i < at + 4; i++)
        pg_deliver(to, i, pg_mul(factor, pg_load(x + i)));
    }
  }
}

template <class T>
static int run(pg_queue *q, float factor, const T *x, int64_t n, int64_t count,
               const pg_target *to) {
  for (int64_t first = 0; first < count; first += MOST) {
    const int64_t some = count - first < MOST ? count - first : MOST;
    /* Four elements of every matrix, of four or two bytes. */
    const bool wide = ((uintptr_t)x & (4 * sizeof(T) - 1)) == 0 && (count == 1 || n % 4 == 0);
    targets all;
    memset(&all, 0, sizeof all);
    for (int64_t i = 0; i < some; i++) all.to[i] = pg_cuda_target_of(&to[first + i]);
    dim3 grid = pg_stride_grid(q, pg_blocks(n, 4));
    grid.y = (unsigned)some;
    PG_CUDA_LAUNCH(q, apply<T>, grid, dim3(PG_CUDA_BLOCK), 0, factor, x + first * n, n, wide, all);
  }
  return 0;
}

int pg_cuda_apply(pg_queue *q, double factor, pg_dtype type, const void *x, int64_t n,
                  int64_t count, const pg_target *to) {
  if (type != PG_F32 && type != PG_BF16)
    return pg_cuda_refuse(q, "increments come from F32 or BF16");
  if (n == 0) return 0;
  PG_CUDA_TYPED(type, T, return run(q, (float)factor, (const T *)x, n, count, to));
}
