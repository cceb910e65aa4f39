/* Sums that decide (fp64), the norm and the clip factor, all of which stay on the device. */
#include "flush.cuh"

/* A vector is cut into at most MAX_BLOCKS blocks by its length alone. In a block, thread t adds
 * elements 4 (t + 256 k) to 4 (t + 256 k) + 3 in order, threads are added in a tree, then blocks in
 * a tree: always in the same order, and with no more than n 2^-53 sum |x_i| between this result and
 * the CPU's, which adds in another one. */
#define MAX_BLOCKS 1024
#define STEP (4 * PG_CUDA_BLOCK)
#define MIN_SIZE (8 * STEP)

template <bool square>
__global__ void block_sums(const float *x, int64_t n, int64_t size, bool wide, double *partial) {
  __shared__ double scratch[PG_WARP];
  int64_t begin = (int64_t)blockIdx.x * size, end = min(n, begin + size);
  double sum = 0;
  for (int64_t i = begin + 4 * (int64_t)threadIdx.x; i < end; i += STEP) {
    float v[4] = {0, 0, 0, 0};
    if (wide && i + 4 <= end) {
      pg_load_wide(x + i, v);
    } else {
      for (int e = 0; e < 4 && i + e < end; e++) v[e] = x[i + e];
    }
    for (int e = 0; e < 4; e++) sum += square ? (double)v[e] * (double)v[e] : (double)v[e];
  }
  sum = pg_block_sum(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __global__ void add_blocks(const double *partial, int count, double *out) {
  __shared__ double scratch[PG_WARP];
  double sum = 0;
  for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) sum += partial[i];
  sum = pg_block_sum(sum, scratch);
  if (threadIdx.x == 0) *out = sum;
}

int pg_cuda_sum(pg_queue *q, const float *x, int64_t n, bool square, double *out) {
  int64_t size = pg_blocks(pg_blocks(n, MAX_BLOCKS), STEP) * STEP;
  if (size < MIN_SIZE) size = MIN_SIZE;
  const int64_t blocks = pg_blocks(n, size);
  const bool wide = pg_wide_aligned(x);
  void *partial;
  if (pg_cuda_scratch(q, MAX_BLOCKS * sizeof(double), &partial) < 0) return -1;
  if (blocks && square) {
    PG_CUDA_LAUNCH(q, block_sums<true>, dim3((unsigned)blocks), dim3(PG_CUDA_BLOCK), 0, x, n, size,
                   wide, (double *)partial);
  } else if (blocks) {
    PG_CUDA_LAUNCH(q, block_sums<false>, dim3((unsigned)blocks), dim3(PG_CUDA_BLOCK), 0, x, n, size,
                   wide, (double *)partial);
  }
  PG_CUDA_LAUNCH(q, add_blocks, dim3(1), dim3(PG_CUDA_BLOCK), 0, (const double *)partial,
                 (int)blocks, out);
  return 0;
}

/* The sums are added in order, as on the CPU: the same bits from the same sums. */
static __global__ void find_factor(const double *sums, int64_t count, double max_norm,
                                   pg_clip *out) {
  __shared__ double loaded[PG_CUDA_BLOCK];
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += PG_CUDA_BLOCK) {
    const int n = (int)min((int64_t)PG_CUDA_BLOCK, count - begin);
    if ((int)threadIdx.x < n) loaded[threadIdx.x] = sums[begin + threadIdx.x];
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < n; i++) total += loaded[i];
    __syncthreads();
  }
  if (threadIdx.x) return;
  const double norm = sqrt(total);
  out->norm = norm;
  out->finite = isfinite(norm) ? 1 : 0;
  out->factor = isinf(max_norm) ? 1.0f : (float)fmin(1.0, max_norm / (norm + 1e-6));
}

int pg_cuda_clip_factor(pg_queue *q, const double *sums, int64_t count, double max_norm,
                        pg_clip *out) {
  PG_CUDA_LAUNCH(q, find_factor, dim3(1), dim3(PG_CUDA_BLOCK), 0, sums, count, max_norm, out);
  return 0;
}

static __global__ void scale_by_factor(const pg_clip *clip, int64_t n, bool wide, float *x) {
  const float factor = clip->factor;
  if (!clip->finite || factor == 1.0f) return;
  for (PG_STRIDE(quad, (n + 3) / 4)) {
    const int64_t at = quad * 4;
    float v[4];
    if (wide && at + 4 <= n) {
      pg_load_wide(x + at, v);
      for (int e = 0; e < 4; e++) v[e] = pg_mul(v[e], factor);
      pg_store_wide(x + at, v);
    } else {
      for (int e = 0; e < 4 && at + e < n; e++) x[at + e] = pg_mul(x[at + e], factor);
    }
  }
}

int pg_cuda_clip_apply(pg_queue *q, const pg_clip *clip, int64_t n, float *x) {
  if (n == 0) return 0;
  PG_CUDA_LAUNCH(q, scale_by_factor, pg_stride_grid(q, pg_blocks(n, 4)), dim3(PG_CUDA_BLOCK), 0,
                 clip, n, pg_wide_aligned(x), x);
  return 0;
}
