/* The gated unit y = silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). */
#include "cuda.cuh"

/* Packs of W elements; the elements after the last whole pack are left to the first threads. */
template <class T, int W>
static __global__ void swiglu_forward(const T *gate, const T *up, int64_t n, T *y) {
  const int64_t packs = n / W;
  for (PG_STRIDE(i, packs)) {
    float g[W], u[W];
    pg_load_wide(gate + i * W, g);
    pg_load_wide(up + i * W, u);
#pragma unroll
    for (int l = 0; l < W; l++) u[l] *= g[l] / (1.0f + expf(-g[l]));
    pg_store_wide(y + i * W, u);
  }
  for (PG_STRIDE(i, n - packs * W)) {
    const int64_t j = packs * W + i;
    const float g = pg_load(gate + j);
    pg_store(y + j, g / (1.0f + expf(-g)) * pg_load(up + j));
  }
}

/* With p = 1/(1 + exp(-g)): dup = dy g p, dgate = dy up p (1 + g (1 - p)). */
static __device__ inline void derivatives(float d, float g, float u, float *dgate, float *dup) {
  const float p = 1.0f / (1.0f + expf(-g));
  *dup = d * (g * p);
  *dgate = d * u * p * (1.0f + g * (1.0f - p));
}

/* Element i is read before it is written, by the same thread: in place is safe. */
template <class T, int W>
static __global__ void swiglu_backward(const T *dy, const T *gate, const T *up, int64_t n, T *dgate,
                                       T *dup) {
  const int64_t packs = n / W;
  for (PG_STRIDE(i, packs)) {
    float d[W], g[W], u[W];
    pg_load_wide(dy + i * W, d);
    pg_load_wide(gate + i * W, g);
    pg_load_wide(up + i * W, u);
#pragma unroll
    for (int l = 0; l < W; l++) derivatives(d[l], g[l], u[l], &g[l], &u[l]);
    pg_store_wide(dgate + i * W, g);
    pg_store_wide(dup + i * W, u);
  }
  for (PG_STRIDE(i, n - packs * W)) {
    const int64_t j = packs * W + i;
    float dg, du;
    derivatives(pg_load(dy + j), pg_load(gate + j), pg_load(up + j), &dg, &du);
    pg_store(dgate + j, dg);
    pg_store(dup + j, du);
  }
}

template <class T> static int forward(pg_queue *q, const T *gate, const T *up, int64_t n, T *y) {
  constexpr int W = pg_wide<T>::width;
  if (n <= 0) return 0;
  if (pg_wide_aligned(gate) && pg_wide_aligned(up) && pg_wide_aligned(y))
    PG_CUDA_LAUNCH(q, (swiglu_forward<T, W>), pg_stride_grid(q, n / W), PG_CUDA_BLOCK, 0, gate, up,
                   n, y);
  else
    PG_CUDA_LAUNCH(q, (swiglu_forward<T, 1>), pg_stride_grid(q, n), PG_CUDA_BLOCK, 0, gate, up, n,
                   y);
  return 0;
}

template <class T>
static int backward(pg_queue *q, const T *dy, const T *gate, const T *up, int64_t n, T *dgate,
                    T *dup) {
  constexpr int W = pg_wide<T>::width;
  if (n <= 0) return 0;
  if (pg_wide_aligned(dy) && pg_wide_aligned(gate) && pg_wide_aligned(up) &&
      pg_wide_aligned(dgate) && pg_wide_aligned(dup))
    PG_CUDA_LAUNCH(q, (swiglu_backward<T, W>), pg_stride_grid(q, n / W), PG_CUDA_BLOCK, 0, dy, gate,
                   up, n, dgate, dup);
  else
    PG_CUDA_LAUNCH(q, (swiglu_backward<T, 1>), pg_stride_grid(q, n), PG_CUDA_BLOCK, 0, dy, gate, up,
                   n, dgate, dup);
  return 0;
}

int pg_cuda_swiglu_forward(pg_queue *q, pg_dtype type, const void *gate, const void *up, int64_t n,
                           void *y) {
  PG_CUDA_TYPED(type, T, return forward(q, (const T *)gate, (const T *)up, n, (T *)y));
}

int pg_cuda_swiglu_backward(pg_queue *q, pg_dtype type, const void *dy, const void *gate,
                            const void *up, int64_t n, void *dgate, void *dup) {
  PG_CUDA_TYPED(
      type, T,
      return backward(q, (const T *)dy, (const T *)gate, (const T *)up, n, (T *)dgate, (T *)dup));
}
