/* Softmax cross entropy over rows of logits with its gradient in place, and the range of rows; one
 * block per row. */
#include "cuda.cuh"

#include <float.h>

#define THREADS 512
#define PACK 4                 /* logits that a thread reads at once */
#define CHUNK (THREADS * PACK) /* logits that the block reads at once */

/* scale * z[j..j+4) with -inf for columns from vocab on. */
static __device__ inline void load_logits(const float *z, int64_t j, int64_t vocab, bool wide,
                                          float scale, float (&to)[PACK]) {
  if (wide && j + PACK <= vocab) {
    pg_load_wide(z + j, to);
#pragma unroll
    for (int l = 0; l < PACK; l++) to[l] *= scale;
  } else {
#pragma unroll
    for (int l = 0; l < PACK; l++) to[l] = j + l < vocab ? z[j + l] * scale : -INFINITY;
  }
}
static __device__ inline void store_pack(float *to, const float (&v)[PACK]) {
  pg_store_wide(to, v);
}
static __device__ inline void store_pack(pg_bf16 *to, const float (&v)[PACK]) {
  *reinterpret_cast<uint2 *>(to) = make_uint2(pg_bf16_bits(v[0]) | pg_bf16_bits(v[1]) << 16,
                                              pg_bf16_bits(v[2]) | pg_bf16_bits(v[3]) << 16);
}

/* Row i: loss[i] = log(sum_j exp z_j) - z_target of the scaled logits z, with a maximum and a sum
 * that every thread carries along its columns: what has been summed shrinks when the maximum grows.
 * Threads join their sums in fp64. The maximum starts at the least finite number, not at -inf, so
 * that logits of -inf count as probability 0; NaN and inf make the loss not finite.
 *
 * The gradient in T overwrites the row from its start. In bf16 the elements of a chunk land on
 * logits that this or an earlier chunk has read, so a barrier between reading and writing is
 * enough. */
template <class T>
static __global__ void cross_entropy(float *logits, int64_t vocab, int64_t ld, bool wide,
                                     const int32_t *targets, float logit_scale, float scale,
                                     bool gradient, float *loss) {
  __shared__ float maxima[PG_WARP];
  __shared__ double sums[PG_WARP];
  const int64_t row = blockIdx.x, target = targets[row];
  const float *z = logits + row * ld;
  T *to = reinterpret_cast<T *>(logits + row * ld);
  float max = -FLT_MAX, sum = 0, v[PACK];
  for (int64_t j = threadIdx.x * PACK; j < vocab; j += CHUNK) {
    load_logits(z, j, vocab, wide, logit_scale, v);
    const float own = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
    if (own > max) {
      sum *= expf(max - own);
      max = own;
    }
    sum += expf(v[0] - max) + expf(v[1] - max) + expf(v[2] - max) + expf(v[3] - max);
  }
  const float whole_max = pg_block_max(max, maxima);
  const double total = pg_block_sum((double)sum * exp((double)max - whole_max), sums);
  if (threadIdx.x == 0) {
    const float at_target = z[target] * logit_scale;
    loss[row] = (float)(log(total) + ((double)whole_max - (double)at_target));
  }
  if (!gradient) return; /* the whole block */
  __syncthreads();       /* the target's logit is read before anything is written */
  const double factor = (double)scale * logit_scale;
  const float f = (float)(factor / total);
  for (int64_t begin = 0; begin < vocab; begin += CHUNK) {
    const int64_t j = begin + threadIdx.x * PACK;
    if (j < vocab) load_logits(z, j, vocab, wide, logit_scale, v);
#pragma unroll
    for (int l = 0; l < PACK; l++) {
      const float e = expf(v[l] - whole_max);
      v[l] = j + l == target ? (float)(factor * (e / total - 1.0)) : e * f;
    }
    if (sizeof(T) < sizeof(float)) __syncthreads();
    if (wide && j + PACK <= vocab) {
      store_pack(to + j, v);
    } else {
#pragma unroll
      for (int l = 0; l < PACK; l++)
        if (j + l < vocab) pg_store(to + j + l, v[l]);
    }
  }
}

int pg_cuda_cross_entropy(pg_queue *q, pg_dtype type, float *logits, int64_t n, int64_t vocab,
                          int64_t ld, const int32_t *targets, float logit_scale, float scale,
                          bool gradient, float *loss) {
  const bool wide = pg_wide_rows(logits, ld);
  if (n <= 0) return 0;
  PG_CUDA_TYPED(type, T,
                PG_CUDA_LAUNCH(q, cross_entropy<T>, dim3((unsigned)n), THREADS, 0, logits, vocab,
                               ld, wide, targets, logit_scale, scale, gradient, loss));
  return 0;
}

/* out[i] = max_j z_ij - min_j z_ij, NaN when an element is not finite. */
static __global__ void row_range(const float *z, int64_t vocab, int64_t ld, bool wide, float *out) {
  __shared__ float scratch[PG_WARP];
  const float *row = z + blockIdx.x * ld;
  float max = -INFINITY, min = INFINITY, bad = 0, v[PACK];
  for (int64_t j = threadIdx.x * PACK; j < vocab; j += CHUNK) {
    load_logits(row, j, vocab, wide, 1, v);
#pragma unroll
    for (int l = 0; l < PACK; l++) {
      if (j + l >= vocab) continue;
      max = fmaxf(max, v[l]);
      min = fminf(min, v[l]);
      bad += v[l] - v[l]; /* NaN unless finite */
    }
  }
  max = pg_block_max(max, scratch);
  min = pg_block_reduce(min, scratch, pg_smaller());
  bad = pg_block_sum(bad, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = max - min + bad;
}

int pg_cuda_row_range(pg_queue *q, const float *z, int64_t n, int64_t vocab, int64_t ld,
                      float *out) {
  if (n <= 0) return 0;
  PG_CUDA_LAUNCH(q, row_range, dim3((unsigned)n), THREADS, 0, z, vocab, ld, pg_wide_rows(z, ld),
                 out);
  return 0;
}
