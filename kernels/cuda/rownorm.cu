/* RowNorm, a warp or a block to a row, which stays in registers between the momentum with its norm
 * and the steps: one pass over g, b and the target. The operations are those of the element-wise
 * kernels (kernels/cpu/rownorm.c); the sum of squares has the order of reduce.cu, so that an
 * optimizer written over tensors gives the same bits. (A row above 8192 elements of a matrix of
 * fewer than 512 rows is summed in one piece here and in several there.) */
#include "target.cuh"

#define WARP_ROW 1024 /* shorter rows take a warp */
#define KEPT 8        /* quads of a thread in registers: rows of 1024 or 8192 */

struct factors {
  float keep, take, offset, step;
};

/* A row of the operands; `quads`: four elements at a time are aligned. */
struct row {
  const float *g; /* or NULL */
  float *b;
  int64_t first, columns; /* index of the row's first element; their number */
  bool quads;
};

/* b <- keep b + take g for elements [j, j + 4), 0 past the end, and their squares onto *sum. */
static __device__ inline void advance(const factors &f, const row &r, int64_t j, float (&b)[4],
                                      double *sum) {
  if (r.quads && j < r.columns) {
    pg_load_wide(r.b + j, b);
    if (r.g) {
      float g[4];
      pg_load_wide(r.g + j, g);
#pragma unroll
      for (int e = 0; e < 4; e++) b[e] = pg_add(pg_mul(f.keep, b[e]), pg_mul(f.take, g[e]));
      pg_store_wide(r.b + j, b);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      b[e] = j + e < r.columns ? r.b[j + e] : 0;
      if (!r.g || j + e >= r.columns) continue;
      b[e] = pg_add(pg_mul(f.keep, b[e]), pg_mul(f.take, r.g[j + e]));
      r.b[j + e] = b[e];
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) *sum += (double)b[e] * (double)b[e];
}

static __device__ inline void finish(const factors &f, const row &r, int64_t j, float norm,
                                     const float (&b)[4], const pg_cuda_target &to) {
  float s[4], w[4];
  if (j >= r.columns) return;
  if (r.quads) pg_fetch_quad(to, r.first + j, w);
#pragma unroll
  for (int e = 0; e < 4; e++) s[e] = pg_mul(pg_div(b[e], norm), f.step);
  if (r.quads) {
    pg_deliver_quad(to, r.first + j, s, w);
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (j + e < r.columns) pg_deliver(to, r.first + j + e, s[e]);
  }
}

template <int threads>
static __global__ void rownorm(factors f, const float *g, int64_t rows, int64_t columns, bool quads,
                               float *b, pg_cuda_target to) {
  __shared__ double scratch[PG_WARP];
  const int thread = (int)threadIdx.x % threads;
  const int64_t i = (int64_t)blockIdx.x * (PG_CUDA_BLOCK / threads) + (int)threadIdx.x / threads;
  const row r = {g ? g + i * columns : NULL, b + i * columns, i * columns, columns, quads};
  float kept[KEPT][4];
  double sum = 0;
  if (i >= rows) return; /* a whole warp */
#pragma unroll
  for (int k = 0; k < KEPT; k++) advance(f, r, 4 * (thread + threads * k), kept[k], &sum);
  for (int64_t j = 4 * (thread + threads * KEPT); j < columns; j += 4 * threads) {
    float more[4];
    advance(f, r, j, more, &sum);
  }
  sum = threads == PG_WARP ? pg_warp_sum(sum) : pg_block_sum(sum, scratch);
  const float norm = pg_add((float)sqrt(sum), f.offset);
#pragma unroll
  for (int k = 0; k < KEPT; k++) finish(f, r, 4 * (thread + threads * k), norm, kept[k], to);
  for (int64_t j = 4 * (thread + threads * KEPT); j < columns; j += 4 * threads) {
    float more[4];
#pragma unroll
    for (int e = 0; e < 4; e++) more[e] = j + e < columns ? r.b[j + e] : 0;
    finish(f, r, j, norm, more, to);
  }
}

int pg_cuda_rownorm(pg_queue *q, const pg_rownorm *h, const float *g, int64_t rows, int64_t columns,
                    float *b, const pg_target *to) {
  const double take = 1 - h->beta;
  const factors f = {(float)(1 - take), (float)take, (float)h->offset, (float)-h->lr};
  const pg_cuda_target target = pg_cuda_target_of(to);
  const bool quads = pg_wide_aligned(g) && pg_wide_aligned(b) && target.wide && (columns % 4 == 0);
  if (rows == 0 || columns == 0) return 0;
  if (columns <= WARP_ROW)
    PG_CUDA_LAUNCH(q, rownorm<PG_WARP>, dim3((unsigned)pg_blocks(rows, PG_CUDA_BLOCK / PG_WARP)),
                   dim3(PG_CUDA_BLOCK), 0, f, g, rows, columns, quads, b, target);
  else
    PG_CUDA_LAUNCH(q, rownorm<PG_CUDA_BLOCK>, dim3((unsigned)rows), dim3(PG_CUDA_BLOCK), 0, f, g,
                   rows, columns, quads, b, target);
  return 0;
}
