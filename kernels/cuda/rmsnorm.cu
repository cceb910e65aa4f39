/* RMS normalisation of rows without gains (Zhang and Sennrich 2019), one warp per row. */
#include "cuda.cuh"

/* x, y [n,d]: y = x r, r = 1/sqrt(mean(x^2) + eps); rstd [n] or NULL. y may be x. */
template <class T, int W>
static __global__ void rmsnorm_forward(const T *x, int64_t n, int64_t d, float eps, T *y,
                                       float *rstd) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  const int lane = threadIdx.x % PG_WARP;
  if (i >= n) return; /* whole warps */
  const T *from = x + i * d;
  T *to = y + i * d;
  float sum = 0, v[W];
  for (int64_t j = lane * W; j < d; j += PG_WARP * W) {
    pg_load_wide(from + j, v);
#pragma unroll
    for (int l = 0; l < W; l++) sum += v[l] * v[l];
  }
  const float r = 1.0f / sqrtf(pg_warp_sum(sum) / (float)d + eps);
  for (int64_t j = lane * W; j < d; j += PG_WARP * W) {
    pg_load_wide(from + j, v);
#pragma unroll
    for (int l = 0; l < W; l++) v[l] *= r;
    pg_store_wide(to + j, v);
  }
  if (rstd && lane == 0) rstd[i] = r;
}

/* dx (+)= r (dy - x r^2 mean(dy . x)). dx may be dy when it is overwritten. */
template <class T, int W>
static __global__ void rmsnorm_backward(const T *dy, const T *x, const float *rstd, int64_t n,
                                        int64_t d, bool add, T *dx) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  const int lane = threadIdx.x % PG_WARP;
  if (i >= n) return;
  const T *dyi = dy + i * d, *xi = x + i * d;
  T *to = dx + i * d;
  float dot = 0, v[W], u[W], w[W];
  for (int64_t j = lane * W; j < d; j += PG_WARP * W) {
    pg_load_wide(dyi + j, v);
    pg_load_wide(xi + j, u);
#pragma unroll
    for (int l = 0; l < W; l++) dot += v[l] * u[l];
  }
  const float r = rstd[i], c = r * r * r * (pg_warp_sum(dot) / (float)d);
  for (int64_t j = lane * W; j < d; j += PG_WARP * W) {
    pg_load_wide(dyi + j, v);
    pg_load_wide(xi + j, u);
#pragma unroll
    for (int l = 0; l < W; l++) v[l] = r * v[l] - c * u[l];
    if (add) {
      pg_load_wide(to + j, w);
#pragma unroll
      for (int l = 0; l < W; l++) v[l] += w[l];
    }
    pg_store_wide(to + j, v);
  }
}

#define ROWS (PG_CUDA_BLOCK / PG_WARP)

template <class T>
static int forward(pg_queue *q, const T *x, int64_t n, int64_t d, float eps, T *y, float *rstd) {
  const dim3 grid((unsigned)pg_blocks(n, ROWS));
  if (n <= 0) return 0;
  if (pg_wide_rows(x, d) && pg_wide_rows(y, d))
    PG_CUDA_LAUNCH(q, (rmsnorm_forward<T, pg_wide<T>::width>), grid, PG_CUDA_BLOCK, 0, x, n, d, eps,
                   y, rstd);
  else
    PG_CUDA_LAUNCH(q, (rmsnorm_forward<T, 1>), grid, PG_CUDA_BLOCK, 0, x, n, d, eps, y, rstd);
  return 0;
}

template <class T>
static int backward(pg_queue *q, const T *dy, const T *x, const float *rstd, int64_t n, int64_t d,
                    bool add, T *dx) {
  const dim3 grid((unsigned)pg_blocks(n, ROWS));
  if (n <= 0) return 0;
  if (pg_wide_rows(dy, d) && pg_wide_rows(x, d) && pg_wide_rows(dx, d))
    PG_CUDA_LAUNCH(q, (rmsnorm_backward<T, pg_wide<T>::width>), grid, PG_CUDA_BLOCK, 0, dy, x, rstd,
                   n, d, add, dx);
  else
    PG_CUDA_LAUNCH(q, (rmsnorm_backward<T, 1>), grid, PG_CUDA_BLOCK, 0, dy, x, rstd, n, d, add, dx);
  return 0;
}

int pg_cuda_rmsnorm_forward(pg_queue *q, pg_dtype type, const void *x, int64_t n, int64_t d,
                            float eps, void *y, float *rstd) {
  PG_CUDA_TYPED(type, T, return forward(q, (const T *)x, n, d, eps, (T *)y, rstd));
}

int pg_cuda_rmsnorm_backward(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                             const float *rstd, int64_t n, int64_t d, bool add, void *dx) {
  PG_CUDA_TYPED(type, T, return backward(q, (const T *)dy, (const T *)x, rstd, n, d, add, (T *)dx));
}
