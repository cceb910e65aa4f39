/* Kernels of diameter.cu, and what they share with its host code. */
#ifndef PG_CUDA_DIAMETER_CUH
#define PG_CUDA_DIAMETER_CUH

#include "column.cuh"

#define PG_TILE 128      /* rows of one side of a tile of distances */
#define PG_TILE_DEPTH 16 /* elements of the rows that are in shared memory at a time */
#define PG_SEEDS 8       /* rows swept at once */
#define PG_SWEEPS 4      /* rounds of sweeps */

/* Rows [i, i+m) against [j, j+n) in the order of decreasing norm. */
struct pg_tile {
  int i, j, m, n;
};
/* Two rows in that order. */
struct pg_candidate {
  int first, second;
};
/* What a batch of tiles found: set to 0, 0, UINT64_MAX before. */
struct pg_found {
  unsigned long long count; /* of candidates, also those that did not fit */
  unsigned long long best;  /* pg_key of the best squared distance */
  unsigned long long pair;  /* first * rows + second of the smallest pair of original rows */
};

/* Ordered by the goodness of a squared distance: the larger one is better for sign 1, the smaller
 * one for -1. Bits of numbers >= 0 are ordered like the numbers. */
static __host__ __device__ inline unsigned long long pg_key(unsigned long long bits, float sign) {
  return sign > 0 ? bits : ~bits;
}

/* The error bound of a squared distance computed in fp32: see kernels/cpu/diameter.c. Infinite when
 * it says nothing. */
static __host__ __device__ inline double pg_slack(int64_t d, double ri, double rj) {
  const double u = 1.0 / 16777216, steps = ((double)d + 4) * u, r = ri + rj;
  if (steps >= 0.5) return INFINITY;
  return 4 * steps / (1 - steps) * ri * rj +
         (8 * u + ((double)d + 64) / 4503599627370496.0) * r * r;
}

/* *bad = min(*bad, first row with an element that is not finite); a warp per row. */
static __global__ void find_bad_row(const float *x, int64_t rows, int64_t d,
                                    unsigned long long *bad) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  int wrong = 0;
  if (i >= rows) return;
  for (int64_t k = threadIdx.x % PG_WARP; k < d; k += PG_WARP) wrong |= !isfinite(x[i * d + k]);
  if (__any_sync(PG_FULL_MASK, wrong) && threadIdx.x % PG_WARP == 0)
    atomicMin(bad, (unsigned long long)i);
}

/* square[i] = |x_i - x_0 - mean|^2; *largest = bits of the largest element. A warp per row. */
static __global__ void measure_rows(const float *x, int64_t rows, int64_t d, const double *mean,
                                    double *square, unsigned long long *largest) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  double sum = 0, top = 0;
  if (i >= rows) return;
  for (int64_t k = threadIdx.x % PG_WARP; k < d; k += PG_WARP) {
    const double v = ((double)x[i * d + k] - (double)x[k]) - mean[k];
    sum += v * v;
    top = fmax(top, fabs(v));
  }
  sum = pg_warp_sum(sum);
  top = pg_warp_max(top);
  if (threadIdx.x % PG_WARP) return;
  square[i] = sum;
  atomicMax(largest, (unsigned long long)__double_as_longlong(top));
}

/* z[p] = fl32(scale (x_i - x_0 - mean)) for i = order[p], `depth` elements of which those from d on
 * are 0; n = |z_p|^2 in fp32, r = |z_p| in fp64. A warp per row. */
static __global__ void centre_rows(const float *x, int64_t rows, int64_t d, const double *mean,
                                   double scale, const int *order, int64_t depth, float *z,
                                   float *n, double *r) {
  const int64_t p = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  double sum = 0;
  if (p >= rows) return;
  const float *row = x + (int64_t)order[p] * d;
  for (int64_t k = threadIdx.x % PG_WARP; k < depth; k += PG_WARP) {
    float v = 0;
    if (k < d) {
      const double exact = (((double)row[k] - (double)x[k]) - mean[k]) * scale;
      if (fabs(exact) >= 1.1754943508222875e-38) v = (float)exact; /* 2^-126 */
    }
    z[p * depth + k] = v;
    sum += (double)v * (double)v;
  }
  sum = pg_warp_sum(sum);
  if (threadIdx.x % PG_WARP) return;
  n[p] = (float)sum;
  r[p] = sqrt(sum);
}

/* far[s, j] = n_j - 2 z_j.z_seed; a warp per row. */
static __global__ void sweep_rows(const float *z, const float *n, int64_t rows, int64_t depth,
                                  const int *seeds, float *far) {
  const int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  float dot[PG_SEEDS] = {0};
  const float *seed[PG_SEEDS];
  if (j >= rows) return;
  for (int s = 0; s < PG_SEEDS; s++) seed[s] = z + (int64_t)seeds[s] * depth;
  for (int64_t k = threadIdx.x % PG_WARP; k < depth; k += PG_WARP) {
    const float v = z[j * depth + k];
#pragma unroll
    for (int s = 0; s < PG_SEEDS; s++) dot[s] += v * seed[s][k];
  }
#pragma unroll
  for (int s = 0; s < PG_SEEDS; s++) {
    dot[s] = pg_warp_sum(dot[s]);
    if (threadIdx.x % PG_WARP == 0) far[s * rows + j] = n[j] - 2 * dot[s];
  }
}

/* Block s: the row farthest from seed s, the smallest among equals, becomes the next seed; both are
 * candidates. */
static __global__ void next_seeds(const float *far, int64_t rows, int *seeds,
                                  pg_candidate *candidates) {
  __shared__ float tops[PG_WARP];
  __shared__ int firsts[PG_WARP];
  const float *mine = far + (int64_t)blockIdx.x * rows;
  float top = -INFINITY;
  int first = 0x7fffffff;
  for (int64_t j = threadIdx.x; j < rows; j += blockDim.x)
    if (mine[j] > top) top = mine[j], first = (int)j;
  const float best = pg_block_reduce(top, tops, pg_larger());
  first = pg_block_reduce(top == best ? first : 0x7fffffff, firsts, pg_smaller());
  if (threadIdx.x) return;
  candidates[blockIdx.x].first = seeds[blockIdx.x];
  candidates[blockIdx.x].second = first;
  seeds[blockIdx.x] = first;
}

/* A tile of squared distances d2 = n_i + n_j - 2 z_i.z_j, products in fp32, and its candidates: the
 * pairs p < o whose key, sign d2, may reach the best of the tile and `bar`, given the error bound.
 * A thread holds rows 4 y + {0..3, 64..67} by columns 4 x + {0..3, 64..67}, y, x < 16. */
static __global__ void __launch_bounds__(PG_CUDA_BLOCK)
    search_tiles(const float *z, const float *n, const double *r, int64_t d, int64_t depth,
                 float sign, const pg_tile *tiles, double bar, pg_candidate *candidates,
                 int64_t capacity, pg_found *found) {
  __shared__ __align__(16) float left[PG_TILE_DEPTH][PG_TILE + 4];
  __shared__ __align__(16) float right[PG_TILE_DEPTH][PG_TILE + 4];
  __shared__ float tops[PG_WARP];
  const pg_tile t = tiles[blockIdx.x];
  const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
  float sum[8][8] = {{0}};
  for (int64_t k0 = 0; k0 < depth; k0 += PG_TILE_DEPTH) {
    for (int h = (int)threadIdx.x; h < PG_TILE * PG_TILE_DEPTH / 4; h += PG_CUDA_BLOCK) {
      const int row = h / 4, k = h % 4 * 4;
      float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
      if (row < t.m) pg_load_wide(z + (int64_t)(t.i + row) * depth + k0 + k, a);
      if (row < t.n) pg_load_wide(z + (int64_t)(t.j + row) * depth + k0 + k, b);
#pragma unroll
      for (int e = 0; e < 4; e++) left[k + e][row] = a[e], right[k + e][row] = b[e];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PG_TILE_DEPTH; k++) {
      float a[2][4], b[2][4];
      pg_load_wide(&left[k][4 * y], a[0]);
      pg_load_wide(&left[k][4 * y + 64], a[1]);
      pg_load_wide(&right[k][4 * x], b[0]);
      pg_load_wide(&right[k][4 * x + 64], b[1]);
#pragma unroll
      for (int u = 0; u < 8; u++)
#pragma unroll
        for (int v = 0; v < 8; v++) sum[u][v] += a[u / 4][u % 4] * b[v / 4][v % 4];
    }
    __syncthreads();
  }
  float top = -INFINITY;
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const int p = 4 * y + u % 4 + u / 4 * 64;
#pragma unroll
    for (int v = 0; v < 8; v++) {
      const int o = 4 * x + v % 4 + v / 4 * 64;
      const bool pair = p < t.m && o < t.n && t.i + p < t.j + o;
      sum[u][v] = pair ? sign * (-2.0f * sum[u][v] + n[t.j + o] + n[t.i + p]) : -INFINITY;
      top = sum[u][v] > top ? sum[u][v] : top;
    }
  }
  top = pg_block_max(top, tops);
  /* The first rows of a tile are its longest. */
  const double widest = pg_slack(d, r[t.i], r[t.j]);
  bar = fmax(bar, (double)top - widest);
  if (top == -INFINITY) return;
#pragma unroll
  for (int u = 0; u < 8; u++)
#pragma unroll
    for (int v = 0; v < 8; v++) {
      const int p = t.i + 4 * y + u % 4 + u / 4 * 64, o = t.j + 4 * x + v % 4 + v / 4 * 64;
      const double d2 = (double)sum[u][v];
      if (sum[u][v] == -INFINITY || !(d2 >= bar - widest)) continue;
      if (!(d2 >= bar - pg_slack(d, r[p], r[o]))) continue;
      const unsigned long long at = atomicAdd(&found->count, 1ull);
      if (at < (unsigned long long)capacity) candidates[at].first = p, candidates[at].second = o;
    }
}

/* squares[c] = |x_i - x_j|^2 in fp64 of candidate c's original rows, and the best of them. Eight
 * lanes take every eighth element and are added in halves, as on the CPU: the same bits. */
static __global__ void evaluate(const float *x, int64_t d, const int *order,
                                const pg_candidate *candidates, int64_t count, float sign,
                                double *squares, pg_found *found) {
  const int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 8;
  double sum = 0;
  if (c < count) {
    const float *a = x + (int64_t)order[candidates[c].first] * d;
    const float *b = x + (int64_t)order[candidates[c].second] * d;
    for (int64_t k = threadIdx.x % 8; k < d; k += 8) {
      const double difference = (double)a[k] - (double)b[k];
      sum = __dadd_rn(sum, __dmul_rn(difference, difference));
    }
  }
  for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(PG_FULL_MASK, sum, step);
  if (c >= count || threadIdx.x % 8) return;
  squares[c] = sum;
  atomicMax(&found->best, pg_key((unsigned long long)__double_as_longlong(sum), sign));
}

/* The smallest of the pairs that reach the best. */
static __global__ void choose_pair(const int *order, int64_t rows, const pg_candidate *candidates,
                                   int64_t count, float sign, const double *squares,
                                   pg_found *found) {
  const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= count) return;
  if (pg_key((unsigned long long)__double_as_longlong(squares[c]), sign) != found->best) return;
  const long long i = order[candidates[c].first], j = order[candidates[c].second];
  atomicMin(&found->pair, (unsigned long long)(min(i, j) * rows + max(i, j)));
}

#endif
