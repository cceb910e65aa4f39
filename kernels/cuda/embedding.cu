/* Rows of a table by token, and the gradient of the table. */
#include "cuda.cuh"

#define ROWS (PG_CUDA_BLOCK / PG_WARP)

/* out[i,:] = weight[tokens[i],:]; tokens [n], weight [V,d], out [n,d]; one warp per row, in units
 * U that divide a row: 16 bytes, or one element. */
template <class U>
static __global__ void embedding_forward(const int32_t *tokens, int64_t n, const U *weight,
                                         int64_t units, U *out) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  if (i >= n) return;
  const U *from = weight + tokens[i] * units;
  for (int64_t j = threadIdx.x % PG_WARP; j < units; j += PG_WARP) out[i * units + j] = from[j];
}

template <class T>
static int forward(pg_queue *q, const int32_t *tokens, int64_t n, const T *weight, int64_t d,
                   T *out) {
  const dim3 grid((unsigned)pg_blocks(n, ROWS));
  if (n <= 0) return 0;
  if (pg_wide_rows(weight, d) && pg_wide_rows(out, d))
    PG_CUDA_LAUNCH(q, embedding_forward<uint4>, grid, PG_CUDA_BLOCK, 0, tokens, n,
                   (const uint4 *)weight, d / pg_wide<T>::width, (uint4 *)out);
  else
    PG_CUDA_LAUNCH(q, embedding_forward<T>, grid, PG_CUDA_BLOCK, 0, tokens, n, weight, d, out);
  return 0;
}

int pg_cuda_embedding_forward(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                              const void *weight, int64_t d, void *out) {
  PG_CUDA_TYPED(type, T, return forward(q, tokens, n, (const T *)weight, d, (T *)out));
}

/* ---- gradient ------------------------------------------------------------------------------ */
/* The first position of every token and how often it occurs. Atomic operations on integers give
 * the same result in every order. */
static __global__ void embedding_count(const int32_t *tokens, int64_t n, unsigned *first,
                                       unsigned *count) {
  for (PG_STRIDE(i, n)) {
    atomicMin(&first[tokens[i]], (unsigned)i);
    atomicAdd(&count[tokens[i]], 1u);
  }
}

#define THREADS 256
#define TILE 1024 /* positions looked at together, four by each thread */

/* dweight[tokens[i],:] += dout[i,:], each row summed in increasing i. The block of a token's first
 * position looks for the others in the tokens that follow, a tile at a time until it has all, and
 * adds their rows. Finding costs at most n/TILE rounds for each token that occurs twice, adding
 * n*d in all. */
template <class T>
static __global__ void embedding_backward(const int32_t *tokens, int64_t n, const unsigned *first,
                                          const unsigned *count, const T *dout, int64_t d,
                                          float *dweight) {
  __shared__ unsigned warps[THREADS / PG_WARP];
  __shared__ int found[TILE]; /* offsets into the tile, increasing */
  const int32_t token = tokens[blockIdx.x];
  if (first[token] != blockIdx.x) return; /* the whole block */
  float *to = dweight + token * d;
  unsigned left = count[token];
  const unsigned warp = threadIdx.x / PG_WARP, lane = threadIdx.x % PG_WARP;
  for (int64_t begin = blockIdx.x; left > 0; begin += TILE) {
    /* Bit l of `match`: position begin + 4 * thread + l has the token. */
    unsigned match = 0;
#pragma unroll
    for (int l = 0; l < TILE / THREADS; l++) {
      const int64_t i = begin + threadIdx.x * (TILE / THREADS) + l;
      if (i < n && tokens[i] == token) match |= 1u << l;
    }
    if (!__syncthreads_or(match != 0)) continue;
    /* Places in `found`: matches of earlier warps and lanes first. */
    const unsigned own = __popc(match);
    unsigned before = own;
    for (int step = 1; step < PG_WARP; step *= 2) {
      const unsigned other = __shfl_up_sync(PG_FULL_MASK, before, step);
      if (lane >= (unsigned)step) before += other;
    }
    if (lane == PG_WARP - 1) warps[warp] = before;
    before -= own;
    __syncthreads();
    unsigned total = 0;
    for (unsigned w = 0; w < THREADS / PG_WARP; w++) {
      if (w == warp) before += total;
      total += warps[w];
    }
    for (int l = 0; l < TILE / THREADS; l++)
      if (match >> l & 1u) found[before++] = (int)threadIdx.x * (TILE / THREADS) + l;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < d; j += THREADS) {
      float sum = to[j];
#pragma unroll 8
      for (unsigned k = 0; k < total; k++) sum += pg_load(dout + (begin + found[k]) * d + j);
      to[j] = sum;
    }
    left -= total;
  }
}

int pg_cuda_embedding_backward(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                               const void *dout, int64_t d, int64_t vocab, float *dweight) {
  void *scratch;
  if (n <= 0) return 0;
  if (n > INT32_MAX) return pg_cuda_refuse(q, "%lld tokens exceed 2^31-1", (long long)n);
  if (pg_cuda_scratch(q, 2 * (size_t)vocab * sizeof(unsigned), &scratch) < 0) return -1;
  unsigned *first = (unsigned *)scratch, *count = first + vocab;
  PG_CUDA(q, cudaMemsetAsync(first, 0xff, (size_t)vocab * sizeof *first, q->stream));
  PG_CUDA(q, cudaMemsetAsync(count, 0, (size_t)vocab * sizeof *count, q->stream));
  PG_CUDA_LAUNCH(q, embedding_count, pg_stride_grid(q, n), PG_CUDA_BLOCK, 0, tokens, n, first,
                 count);
  PG_CUDA_TYPED(type, T,
                PG_CUDA_LAUNCH(q, embedding_backward<T>, dim3((unsigned)n), THREADS, 0, tokens, n,
                               first, count, (const T *)dout, d, dweight));
  return 0;
}
