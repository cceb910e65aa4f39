/* Momentum by sums, and the direction that is normalised next, in one pass over g, b and x, for
 * many matrices in one launch. The arithmetic is that of the element-wise kernels. Squares are
 * added in fp64 in an order that the size fixes: in a run of RUN elements thread t of 256 adds
 * elements 4 (t + 256 k) to 4 (t + 256 k) + 3 in order, threads are added in a tree, then runs
 * likewise. */
#include "flush.cuh"

#include <string.h>

#define RUN 8192

/* The matrices of one launch travel with its arguments. */
static constexpr int MOST = 128;
struct matrices {
  const float *g[MOST];
  float *b[MOST];
};

/* A column of blocks for each matrix, a block for each run. */
static __global__ void momentum(float mu, bool nesterov, matrices all, int64_t n, bool wide,
                                float *x, double *squares) {
  __shared__ double scratch[PG_WARP];
  const float *g = all.g[blockIdx.y];
  float *b = all.b[blockIdx.y];
  const int64_t begin = (int64_t)blockIdx.x * RUN, end = min(n, begin + RUN);
  double sum = 0;
  wide = wide && pg_wide_aligned(g) && pg_wide_aligned(b);
  if (x) x += blockIdx.y * n;
  for (int64_t i = begin + 4 * (int64_t)threadIdx.x; i < end; i += 4 * PG_CUDA_BLOCK) {
    float gi[4] = {0, 0, 0, 0}, bi[4] = {0, 0, 0, 0}, xi[4];
    const bool quad = wide && i + 4 <= end;
    if (quad) {
      pg_load_wide(g + i, gi);
      pg_load_wide(b + i, bi);
    } else {
      for (int e = 0; e < 4 && i + e < end; e++) gi[e] = g[i + e], bi[e] = b[i + e];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      bi[e] = pg_add(pg_mul(mu, bi[e]), gi[e]);
      xi[e] = nesterov ? pg_add(pg_mul(mu, bi[e]), gi[e]) : bi[e];
      sum += (double)xi[e] * (double)xi[e]; /* 0 past the end */
    }
    if (quad) {
      pg_store_wide(b + i, bi);
      if (x) pg_store_wide(x + i, xi);
    } else {
      for (int e = 0; e < 4 && i + e < end; e++) {
        b[i + e] = bi[e];
        if (x) x[i + e] = xi[e];
      }
    }
  }
  if (!x) return;
  sum = pg_block_sum(sum, scratch);
  if (threadIdx.x == 0) squares[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

static __global__ void join_runs(const double *squares, int64_t runs, float *norm) {
  __shared__ double scratch[PG_WARP];
  double sum = 0;
  for (int64_t t = threadIdx.x; t < runs; t += blockDim.x) sum += squares[blockIdx.x * runs + t];
  sum = pg_block_sum(sum, scratch);
  if (threadIdx.x == 0) norm[blockIdx.x] = (float)sqrt(sum);
}

int pg_cuda_momentum(pg_queue *q, double mu, bool nesterov, int64_t count, const float *const *g,
                     float *const *b, int64_t n, float *x, float *norm) {
  const int64_t runs = pg_blocks(n, RUN);
  void *squares = NULL;
  if (count == 0 || (n == 0 && !x)) return 0;
  if (x && pg_cuda_scratch(q, (size_t)(count * runs) * sizeof(double), &squares) < 0) return -1;
  for (int64_t first = 0; n > 0 && first < count; first += MOST) {
    const int64_t some = count - first < MOST ? count - first : MOST;
    const bool wide = !x || (pg_wide_aligned(x) && (count == 1 || n % 4 == 0));
    matrices all;
    memset(&all, 0, sizeof all);
    memcpy(all.g, g + first, (size_t)some * sizeof *g);
    memcpy(all.b, b + first, (size_t)some * sizeof *b);
    PG_CUDA_LAUNCH(q, momentum, dim3((unsigned)runs, (unsigned)some), dim3(PG_CUDA_BLOCK), 0,
                   (float)mu, nesterov, all, n, wide, x ? x + first * n : NULL,
                   (double *)squares + (x ? first * runs : 0));
  }
  if (x)
    PG_CUDA_LAUNCH(q, join_runs, dim3((unsigned)count), dim3(PG_CUDA_BLOCK), 0,
                   (const double *)squares, runs, norm);
  return 0;
}
