/* Reductions of matrix views along rows, along columns, or of everything.
 *
 * Order of the fp64 sums, fixed by the shape: in a run, thread t of 32 or 256 adds elements
 * 4 (t + threads k) to 4 (t + threads k) + 3 in order, then threads are added in a tree. Long rows
 * of short matrices, and everything, are cut into runs whose sums are added in the same way.
 * Reducing along columns adds rows in order inside fixed blocks of rows, then the blocks in order.
 * Against the CPU's order the fp64 sums differ by n 2^-53 sum |x_i| at most, before one rounding
 * to fp32. Extremes do not depend on an order: NaN beats every number, and the first of equals
 * stays. */
#include "column.cuh"

#define RUN 8192      /* elements of one run where rows are cut */
#define FEW_ROWS 512  /* matrices of fewer rows have their rows cut */
#define WARP_RUN 1024 /* shorter runs take a warp, others a block */

/* What has been seen of a set of elements: a sum, or the extreme and where it is. */
struct partial {
  double value;
  int64_t index;
};

template <bool square> struct sums {
  static __device__ partial empty() {
    const partial p = {0, 0};
    return p;
  }
  static __device__ partial of(float x, int64_t) {
    const partial p = {square ? (double)x * (double)x : (double)x, 0};
    return p;
  }
  static __device__ partial join(partial a, partial b) {
    a.value += b.value;
    return a;
  }
};

template <bool max> struct extremes {
  static __device__ partial empty() {
    const partial p = {max ? -INFINITY : INFINITY, INT64_MAX};
    return p;
  }
  static __device__ partial of(float x, int64_t index) {
    const partial p = {(double)x, index};
    return p;
  }
  static __device__ partial join(partial a, partial b) {
    const bool nan_a = isnan(a.value), nan_b = isnan(b.value);
    bool take = b.index < a.index;
    if (nan_a != nan_b)
      take = nan_b;
    else if (!nan_a && a.value != b.value)
      take = max ? b.value > a.value : b.value < a.value;
    return take ? b : a;
  }
};

static __device__ inline float finish(pg_reduce_op op, partial p, int64_t count) {
  switch (op) {
  case PG_MEAN: return (float)(p.value / (double)count);
  case PG_NORM: return (float)sqrt(p.value);
  case PG_ARGMAX:
  case PG_ARGMIN: return count ? (float)p.index : 0.0f;
  default: return (float)p.value;
  }
}

/* Every thread of a block of whole warps, or with `warp_only` of a warp, gets the joined result. */
template <class P> static __device__ partial join_threads(partial p, bool warp_only) {
  __shared__ double value[PG_WARP];
  __shared__ int64_t index[PG_WARP];
  const int warp = (int)threadIdx.x / PG_WARP, warps = (int)blockDim.x / PG_WARP;
  for (int step = PG_WARP / 2; step > 0; step /= 2) {
    partial other;
    other.value = __shfl_xor_sync(PG_FULL_MASK, p.value, step);
    other.index = __shfl_xor_sync(PG_FULL_MASK, p.index, step);
    p = P::join(p, other);
  }
  if (warp_only) return p;
  if (threadIdx.x % PG_WARP == 0) value[warp] = p.value, index[warp] = p.index;
  __syncthreads();
  for (int w = 0; w < warps; w++) {
    const partial other = {value[w], index[w]};
    p = w ? P::join(p, other) : other;
  }
  return p;
}

/* Run t is elements [t % chunks * size, ...) of row t / chunks, at most `size` of them. A block
 * takes one, or `each` = 8 of them with a warp for each. With a single chunk the result is
 * finished; otherwise it goes to `parts`, its index counted over the whole matrix. */
template <class P>
__global__ void reduce_runs(pg_reduce_op op, const float *x, int64_t row_stride,
                            int64_t column_stride, bool wide, int64_t columns, int64_t chunks,
                            int64_t size, int64_t runs, int each, partial *parts, float *out) {
  const bool warps = each > 1;
  const int64_t t = (int64_t)blockIdx.x * each + (warps ? threadIdx.x / PG_WARP : 0);
  const int thread = (int)threadIdx.x % (warps ? PG_WARP : PG_CUDA_BLOCK);
  const int step = 4 * (warps ? PG_WARP : PG_CUDA_BLOCK);
  if (t >= runs) return; /* whole warps, or no block at all */
  const int64_t row = t / chunks, begin = t % chunks * size, end = min(columns, begin + size);
  const float *from = x + row * row_stride;
  partial p = P::empty();
  for (int64_t j = begin + 4 * thread; j < end; j += step) {
    if (wide && j + 4 <= end) {
      float v[4];
      pg_load_wide(from + j, v);
#pragma unroll
      for (int e = 0; e < 4; e++) p = P::join(p, P::of(v[e], j + e));
    } else {
      for (int64_t l = j; l < min(end, j + 4); l++)
        p = P::join(p, P::of(from[l * column_stride], l));
    }
  }
  p = join_threads<P>(p, warps);
  if (thread) return;
  if (parts) {
    p.index += row * columns;
    parts[t] = p;
  } else {
    out[row] = finish(op, p, columns);
  }
}

/* out[g] from parts [g * per, (g+1) * per), whose indices count from g * base. */
template <class P>
__global__ void join_parts(pg_reduce_op op, const partial *parts, int64_t per, int64_t base,
                           int64_t count, float *out) {
  partial p = P::empty();
  parts += (int64_t)blockIdx.x * per;
  for (int64_t t = threadIdx.x; t < per; t += blockDim.x) p = P::join(p, parts[t]);
  p = join_threads<P>(p, false);
  p.index -= (int64_t)blockIdx.x * base;
  if (threadIdx.x == 0) out[blockIdx.x] = finish(op, p, count);
}

/* Each row of a, or with `all` everything at once. */
template <class P>
static int along_rows(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                      bool all, float *out) {
  const bool cut = all || rows < FEW_ROWS;
  const int64_t size = cut && columns > RUN ? RUN : columns;
  const int64_t chunks = size ? pg_blocks(columns, size) : 1, runs = rows * chunks;
  const bool wide =
      a.column_stride == 1 && pg_wide_aligned(a.data) && (rows == 1 || a.row_stride % 4 == 0);
  const int each = size <= WARP_RUN ? PG_CUDA_BLOCK / PG_WARP : 1;
  const bool whole = chunks == 1 && (!all || rows == 1);
  void *parts = NULL;
  if (!whole && pg_cuda_scratch(q, (size_t)runs * sizeof(partial) + 1, &parts) < 0) return -1;
  if (runs)
    PG_CUDA_LAUNCH(q, reduce_runs<P>, dim3((unsigned)pg_blocks(runs, each)), dim3(PG_CUDA_BLOCK), 0,
                   op, a.data, a.row_stride, a.column_stride, wide, columns, chunks, size, runs,
                   each, (partial *)parts, out);
  if (whole) return 0;
  PG_CUDA_LAUNCH(q, join_parts<P>, dim3(all ? 1u : (unsigned)rows), dim3(PG_CUDA_BLOCK), 0, op,
                 (const partial *)parts, all ? runs : chunks, all ? 0 : columns,
                 all ? rows * columns : columns, out);
  return 0;
}

/* Rows of one block, in order, for column j of each thread: parts [blocks, columns]. */
template <class P>
__global__ void reduce_column_blocks(const float *x, int64_t row_stride, int64_t column_stride,
                                     int64_t rows, int64_t columns, int64_t size, partial *parts) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t begin = (int64_t)blockIdx.y * size, end = min(rows, begin + size);
  if (j >= columns) return;
  partial p = P::empty();
  for (int64_t i = begin; i < end; i++)
    p = P::join(p, P::of(x[i * row_stride + j * column_stride], i));
  parts[(int64_t)blockIdx.y * columns + j] = p;
}

template <class P>
__global__ void join_column_blocks(pg_reduce_op op, const partial *parts, int64_t blocks,
                                   int64_t columns, int64_t rows, float *out) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= columns) return;
  partial p = P::empty();
  for (int64_t b = 0; b < blocks; b++) p = P::join(p, parts[b * columns + j]);
  out[j] = finish(op, p, rows);
}

template <class P>
static int along_columns(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                         float *out) {
  const int64_t size = pg_column_block_rows(rows), blocks = pg_blocks(rows, size);
  const dim3 across((unsigned)pg_blocks(columns, PG_CUDA_BLOCK));
  void *parts;
  if (columns == 0) return 0;
  if (pg_cuda_scratch(q, (size_t)(blocks * columns) * sizeof(partial) + 1, &parts) < 0) return -1;
  if (blocks)
    PG_CUDA_LAUNCH(q, reduce_column_blocks<P>, dim3(across.x, (unsigned)blocks),
                   dim3(PG_CUDA_BLOCK), 0, a.data, a.row_stride, a.column_stride, rows, columns,
                   size, (partial *)parts);
  PG_CUDA_LAUNCH(q, join_column_blocks<P>, across, dim3(PG_CUDA_BLOCK), 0, op,
                 (const partial *)parts, blocks, columns, rows, out);
  return 0;
}

template <class P>
static int reduce(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns, int axis,
                  float *out) {
  if (axis < 0) {
    /* A column or a matrix without gaps is one long row. */
    if (columns == 1) a.column_stride = a.row_stride;
    if (columns == 1 || (a.column_stride == 1 && a.row_stride == columns)) {
      columns *= rows;
      rows = 1;
    }
    return along_rows<P>(q, op, a, rows, columns, true, out);
  }
  if (axis == 0 && a.row_stride == 1 && a.column_stride != 1) {
    /* A transposed view: its columns are runs. */
    const pg_view turned = {a.data, a.column_stride, a.row_stride};
    return along_rows<P>(q, op, turned, columns, rows, false, out);
  }
  if (axis == 0) return along_columns<P>(q, op, a, rows, columns, out);
  return along_rows<P>(q, op, a, rows, columns, false, out);
}

int pg_cuda_reduce(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns, int axis,
                   float *out) {
  switch (op) {
  case PG_SUM:
  case PG_MEAN: return reduce<sums<false>>(q, op, a, rows, columns, axis, out);
  case PG_NORM: return reduce<sums<true>>(q, op, a, rows, columns, axis, out);
  case PG_RMAX:
  case PG_ARGMAX: return reduce<extremes<true>>(q, op, a, rows, columns, axis, out);
  case PG_RMIN:
  case PG_ARGMIN: return reduce<extremes<false>>(q, op, a, rows, columns, axis, out);
  }
  return pg_cuda_refuse(q, "no reduction %d", (int)op);
}
