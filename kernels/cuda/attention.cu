/* Causal attention in tiles of queries and keys, so that time x time scores are never stored
 * (Dao et al. 2022). Plain CUDA: operands are widened to fp32 in shared memory and multiplied
 * there.
 *
 * Head vectors of one head lie ld = heads*head_dim apart. A tile holds TILE of them, padded with
 * zeros to D >= head_dim elements and to the end of the sequence, in rows D + 4 apart: then the
 * 16-byte reads of eight neighbouring rows touch all banks once. A block of 16 x 16 threads
 * computes TILE x TILE scores, thread (x, y) rows y + 16 a and columns x + 16 b.
 *
 * The backward pass recomputes the probabilities from the stored log-sum-exp, once for the queries'
 * gradient and once for that of keys and values: every result has one block that sums it, in a
 * fixed order. */
#include "attention_path.cuh"

#include <math.h>

#define SIDE 16
#define THREADS (SIDE * SIDE)

struct shape {
  int64_t time, heads, head_dim, ld, tiles, sequences; /* sequences = batch * heads */
  float scale;
  int32_t wide; /* whether rows allow 16-byte reads */
};

template <int TILE> struct tile_size {
  static constexpr int each = TILE / SIDE; /* rows, and columns of scores, of a thread */
  static constexpr int score_ld = TILE + 4;
};

/* Elements that a thread takes together of an output row: columns PACK x + 16 PACK b + 0..PACK-1 */
template <int D> struct columns {
  static constexpr int pack = D % 64 == 0 ? 4 : 2, groups = D / (SIDE * pack), each = D / SIDE;
};

/* to [TILE, D + 4] = factor * rows [count, head_dim], zeros elsewhere. */
template <int TILE, int D, class T>
static __device__ void load_tile(const T *rows, const shape &s, int64_t count, float factor,
                                 float *to) {
  if (s.wide) {
    constexpr int W = pg_wide<T>::width, packs = D / W;
    for (int i = threadIdx.x; i < TILE * packs; i += THREADS) {
      const int row = i / packs, column = i % packs * W;
      float v[W] = {};
      if (row < count && column < s.head_dim) pg_load_wide(rows + row * s.ld + column, v);
#pragma unroll pg_whole
      for (int l = 0; l < W; l += 4) {
        const float part[4] = {factor * v[l], factor * v[l + 1], factor * v[l + 2],
                               factor * v[l + 3]};
        pg_store_wide(to + row * (D + 4) + column + l, part);
      }
    }
  } else {
    for (int i = threadIdx.x; i < TILE * D; i += THREADS) {
      const int row = i / D, column = i % D;
      to[row * (D + 4) + column] =
          row < count && column < s.head_dim ? factor * pg_load(rows + row * s.ld + column) : 0.0f;
    }
  }
}

/* scores = A B' of two tiles. */
template <int TILE, int D>
static __device__ inline void multiply_rows(const float *a, const float *b,
                                            float (&scores)[TILE / SIDE][TILE / SIDE]) {
  constexpr int E = tile_size<TILE>::each;
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll pg_whole
  for (int r = 0; r < E; r++)
#pragma unroll pg_whole
    for (int c = 0; c < E; c++) scores[r][c] = 0;
#pragma unroll 4
  for (int k = 0; k < D; k += 4) {
    float u[E][4], v[E][4];
#pragma unroll pg_whole
    for (int e = 0; e < E; e++) {
      pg_load_wide(a + (y + SIDE * e) * (D + 4) + k, u[e]);
      pg_load_wide(b + (x + SIDE * e) * (D + 4) + k, v[e]);
    }
#pragma unroll pg_whole
    for (int r = 0; r < E; r++)
#pragma unroll pg_whole
      for (int c = 0; c < E; c++)
#pragma unroll pg_whole
        for (int l = 0; l < 4; l++) scores[r][c] += u[r][l] * v[c][l];
  }
}

/* sum += P B with weights P [TILE, TILE + 4] and a tile B [TILE, D + 4]. */
template <int TILE, int D>
static __device__ inline void add_weighted(const float *p, const float *b,
                                           float (&sum)[TILE / SIDE][D / SIDE]) {
  constexpr int E = tile_size<TILE>::each, P = columns<D>::pack, G = columns<D>::groups;
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll 2
  for (int k = 0; k < TILE; k += 4) {
    float u[E][4];
#pragma unroll pg_whole
    for (int r = 0; r < E; r++)
      pg_load_wide(p + (y + SIDE * r) * tile_size<TILE>::score_ld + k, u[r]);
#pragma unroll pg_whole
    for (int l = 0; l < 4; l++)
#pragma unroll pg_whole
      for (int g = 0; g < G; g++) {
        const float *from = b + (k + l) * (D + 4) + P * (x + SIDE * g);
        float v[P];
        if (P == 4) {
          const float4 w = *reinterpret_cast<const float4 *>(from);
          v[0] = w.x, v[1] = w.y, v[P - 2] = w.z, v[P - 1] = w.w;
        } else {
          const float2 w = *reinterpret_cast<const float2 *>(from);
          v[0] = w.x, v[1] = w.y;
        }
#pragma unroll pg_whole
        for (int r = 0; r < E; r++)
#pragma unroll pg_whole
          for (int c = 0; c < P; c++) sum[r][g * P + c] += u[r][l] * v[c];
      }
  }
}

/* rows [count, head_dim] = factor[row] * sum. */
template <int TILE, int D, class T>
static __device__ inline void store_tile(const float (&sum)[TILE / SIDE][D / SIDE],
                                         const float (&factor)[TILE / SIDE], const shape &s,
                                         int64_t count, T *rows) {
  constexpr int P = columns<D>::pack;
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll pg_whole
  for (int r = 0; r < TILE / SIDE; r++)
#pragma unroll pg_whole
    for (int c = 0; c < D / SIDE; c++) {
      const int row = y + SIDE * r, column = P * (x + SIDE * (c / P)) + c % P;
      if (row < count && column < s.head_dim)
        pg_store(rows + row * s.ld + column, factor[r] * sum[r][c]);
    }
}

/* Scores to shared memory as weights of add_weighted. */
template <int TILE>
static __device__ inline void store_scores(const float (&scores)[TILE / SIDE][TILE / SIDE],
                                           float *to) {
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll pg_whole
  for (int r = 0; r < TILE / SIDE; r++)
#pragma unroll pg_whole
    for (int c = 0; c < TILE / SIDE; c++)
      to[(y + SIDE * r) * tile_size<TILE>::score_ld + x + SIDE * c] = scores[r][c];
}

/* Over the 16 threads that share rows: the lanes of half a warp. */
template <class Join> static __device__ inline float row_reduce(float value, Join join) {
#pragma unroll pg_whole
  for (int step = SIDE / 2; step > 0; step /= 2)
    value = join(value, __shfl_xor_sync(PG_FULL_MASK, value, step));
  return value;
}

static __device__ inline int64_t head_offset(const shape &s, int64_t sequence) {
  return sequence / s.heads * s.time * s.ld + sequence % s.heads * s.head_dim;
}

/* ---- forward ------------------------------------------------------------------------------- */
/* One tile of queries of one head: the maximum and the sum of exponentials are carried from tile to
 * tile of keys, and what has been summed shrinks when the maximum grows. Late queries meet more
 * keys, so the longest blocks come first. */
template <int TILE, int D, class T>
static __global__ void __launch_bounds__(THREADS)
    attention_forward(shape s, const T *query, const T *key, const T *value, T *out, float *lse) {
  constexpr int E = tile_size<TILE>::each;
  PG_DYN_SHARED(float, memory);
  float *queries = memory, *others = queries + TILE * (D + 4), *weights = others + TILE * (D + 4);
  const int64_t sequence = blockIdx.x % s.sequences;
  const int64_t i = (s.tiles - 1 - blockIdx.x / s.sequences) * TILE;
  const int64_t base = head_offset(s, sequence);
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  float o[E][D / SIDE] = {}, max[E], sum[E], p[E][E];
#pragma unroll pg_whole
  for (int r = 0; r < E; r++) max[r] = -INFINITY, sum[r] = 0;
  load_tile<TILE, D>(query + base + i * s.ld, s, s.time - i, s.scale, queries);
  for (int64_t j = 0; j <= i; j += TILE) {
    __syncthreads(); /* the values and weights before are used up */
    load_tile<TILE, D>(key + base + j * s.ld, s, s.time - j, 1, others);
    __syncthreads();
    multiply_rows<TILE, D>(queries, others, p);
#pragma unroll pg_whole
    for (int r = 0; r < E; r++) {
      float top = max[r];
#pragma unroll pg_whole
      for (int c = 0; c < E; c++) {
        /* Keys past the end come after every query. */
        if (j == i && x + SIDE * c > y + SIDE * r) p[r][c] = -INFINITY;
        top = fmaxf(top, p[r][c]);
      }
      top = row_reduce(top, pg_larger());
      const float shrink = expf(max[r] - top);
      float part = 0;
#pragma unroll pg_whole
      for (int c = 0; c < E; c++) {
        p[r][c] = expf(p[r][c] - top);
        part += p[r][c];
      }
      sum[r] = sum[r] * shrink + part;
      max[r] = top;
#pragma unroll pg_whole
      for (int c = 0; c < D / SIDE; c++) o[r][c] *= shrink;
    }
    __syncthreads(); /* the keys are used up */
    store_scores<TILE>(p, weights);
    load_tile<TILE, D>(value + base + j * s.ld, s, s.time - j, 1, others);
    __syncthreads();
    add_weighted<TILE, D>(weights, others, o);
  }
#pragma unroll pg_whole
  for (int r = 0; r < E; r++) {
    const float total = row_reduce(sum[r], pg_plus());
    const int64_t row = i + y + SIDE * r;
    if (x == 0 && row < s.time) lse[sequence * s.time + row] = max[r] + logf(total);
    sum[r] = 1.0f / total;
  }
  store_tile<TILE, D>(o, sum, s, s.time - i, out + base + i * s.ld);
}

/* ---- backward ------------------------------------------------------------------------------ */
/* delta [sequences, time] = rowsum(dout . out), one warp per head vector. */
template <class T>
static __global__ void attention_delta(shape s, const T *dout, const T *out, float *delta) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / PG_WARP;
  const int lane = threadIdx.x % PG_WARP;
  if (i >= s.sequences * s.time) return; /* whole warps */
  const int64_t at = head_offset(s, i / s.time) + i % s.time * s.ld;
  float sum = 0;
  for (int64_t j = lane; j < s.head_dim; j += PG_WARP)
    sum += pg_load(dout + at + j) * pg_load(out + at + j);
  sum = pg_warp_sum(sum);
  if (lane == 0) delta[i] = sum;
}

/* With P = exp(scale Q K' - lse) and dS = scale P o (dO V' - delta): dQ = dS K. One tile of queries
 * against all their keys. */
template <int TILE, int D, class T>
static __global__ void __launch_bounds__(THREADS)
    attention_dquery(shape s, const T *dout, const T *query, const T *key, const T *value,
                     const float *lse, const float *delta, T *dquery) {
  constexpr int E = tile_size<TILE>::each, SIZE = TILE * (D + 4);
  PG_DYN_SHARED(float, memory);
  float *queries = memory, *douts = queries + SIZE, *keys = douts + SIZE, *values = keys + SIZE;
  float *weights = values + SIZE;
  const int64_t sequence = blockIdx.x % s.sequences;
  const int64_t i = (s.tiles - 1 - blockIdx.x / s.sequences) * TILE;
  const int64_t base = head_offset(s, sequence);
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  float dq[E][D / SIDE] = {}, p[E][E], ds[E][E], row_lse[E], row_delta[E], factor[E];
#pragma unroll pg_whole
  for (int r = 0; r < E; r++) {
    const int64_t row = i + y + SIDE * r;
    /* Probabilities of queries past the end come out 0. */
    row_lse[r] = row < s.time ? lse[sequence * s.time + row] : INFINITY;
    row_delta[r] = row < s.time ? delta[sequence * s.time + row] : 0;
    factor[r] = s.scale;
  }
  load_tile<TILE, D>(query + base + i * s.ld, s, s.time - i, s.scale, queries);
  load_tile<TILE, D>(dout + base + i * s.ld, s, s.time - i, 1, douts);
  for (int64_t j = 0; j <= i; j += TILE) {
    __syncthreads(); /* keys and weights before are used up */
    load_tile<TILE, D>(key + base + j * s.ld, s, s.time - j, 1, keys);
    load_tile<TILE, D>(value + base + j * s.ld, s, s.time - j, 1, values);
    __syncthreads();
    multiply_rows<TILE, D>(queries, keys, p);
    multiply_rows<TILE, D>(douts, values, ds);
#pragma unroll pg_whole
    for (int r = 0; r < E; r++)
#pragma unroll pg_whole
      for (int c = 0; c < E; c++) {
        const bool masked = j == i && x + SIDE * c > y + SIDE * r;
        ds[r][c] = masked ? 0 : expf(p[r][c] - row_lse[r]) * (ds[r][c] - row_delta[r]);
      }
    store_scores<TILE>(ds, weights);
    __syncthreads();
    add_weighted<TILE, D>(weights, keys, dq);
  }
  store_tile<TILE, D>(dq, factor, s, s.time - i, dquery + base + i * s.ld);
}

/* dV = P' dO, dK = dS' Q. One tile of keys against all queries from it on; scores are computed
 * transposed, [keys, queries]. */
template <int TILE, int D, class T>
static __global__ void __launch_bounds__(THREADS)
    attention_dkey_dvalue(shape s, const T *dout, const T *query, const T *key, const T *value,
                          const float *lse, const float *delta, T *dkey, T *dvalue) {
  constexpr int E = tile_size<TILE>::each, SIZE = TILE * (D + 4);
  PG_DYN_SHARED(float, memory);
  float *queries = memory, *douts = queries + SIZE, *keys = douts + SIZE, *values = keys + SIZE;
  float *weights = values + SIZE;
  const int64_t sequence = blockIdx.x % s.sequences, j = blockIdx.x / s.sequences * TILE;
  const int64_t base = head_offset(s, sequence);
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  float dk[E][D / SIDE] = {}, dv[E][D / SIDE] = {}, p[E][E], ds[E][E], one[E];
  load_tile<TILE, D>(key + base + j * s.ld, s, s.time - j, 1, keys);
  load_tile<TILE, D>(value + base + j * s.ld, s, s.time - j, 1, values);
  for (int64_t i = j; i < s.time; i += TILE) {
    __syncthreads(); /* queries, douts and weights before are used up */
    load_tile<TILE, D>(query + base + i * s.ld, s, s.time - i, s.scale, queries);
    load_tile<TILE, D>(dout + base + i * s.ld, s, s.time - i, 1, douts);
    __syncthreads();
    multiply_rows<TILE, D>(keys, queries, p);
    multiply_rows<TILE, D>(values, douts, ds);
#pragma unroll pg_whole
    for (int c = 0; c < E; c++) {
      const int64_t row = i + x + SIDE * c;
      const float row_lse = row < s.time ? lse[sequence * s.time + row] : INFINITY;
      const float row_delta = row < s.time ? delta[sequence * s.time + row] : 0;
#pragma unroll pg_whole
      for (int r = 0; r < E; r++) {
        const bool masked = j == i && y + SIDE * r > x + SIDE * c;
        p[r][c] = masked ? 0 : expf(p[r][c] - row_lse);
        ds[r][c] = p[r][c] * (ds[r][c] - row_delta);
      }
    }
    store_scores<TILE>(p, weights);
    __syncthreads();
    add_weighted<TILE, D>(weights, douts, dv);
    __syncthreads();
    store_scores<TILE>(ds, weights);
    __syncthreads();
    add_weighted<TILE, D>(weights, queries, dk); /* the queries carry the scale already */
  }
#pragma unroll pg_whole
  for (int r = 0; r < E; r++) one[r] = 1;
  store_tile<TILE, D>(dk, one, s, s.time - j, dkey + base + j * s.ld);
  store_tile<TILE, D>(dv, one, s, s.time - j, dvalue + base + j * s.ld);
}

/* ---- host ---------------------------------------------------------------------------------- */
/* The tensors of a call; NULL where the direction has none. */
template <class T> struct call {
  const T *query, *key, *value, *dout, *out;
  T *result, *dquery, *dkey, *dvalue;
  float *lse, *delta;
  bool ask; /* nothing is computed: can such a call run? */
};

/* Bytes of shared memory: `count` tiles of positions and one of weights. */
template <int TILE, int D> static constexpr size_t shared_bytes(int count) {
  return ((size_t)count * TILE * (D + 4) + TILE * tile_size<TILE>::score_ld) * sizeof(float);
}

template <int TILE, int D, class T> static int run(pg_queue *q, shape s, const call<T> &a) {
  const size_t two = shared_bytes<TILE, D>(2), four = shared_bytes<TILE, D>(4);
  if (four > q->shared)
    return pg_cuda_refuse(q,
                          "attention with head_dim %lld needs %zu KiB of shared memory per "
                          "block; this GPU has %zu",
                          (long long)s.head_dim, four >> 10, q->shared >> 10);
  s.tiles = pg_blocks(s.time, TILE);
  const int64_t blocks = s.tiles * s.sequences, warps = s.time * s.sequences;
  if (blocks > INT32_MAX || warps > INT32_MAX)
    return pg_cuda_refuse(q, "%lld heads of %lld positions are too many", (long long)s.sequences,
                          (long long)s.time);
  if (a.ask) return 0;
  if (!a.dout) {
    PG_CUDA_LAUNCH(q, (attention_forward<TILE, D, T>), dim3((unsigned)blocks), THREADS, two, s,
                   a.query, a.key, a.value, a.result, a.lse);
    return 0;
  }
  PG_CUDA_LAUNCH(q, attention_delta<T>, dim3((unsigned)pg_blocks(warps, PG_CUDA_BLOCK / PG_WARP)),
                 PG_CUDA_BLOCK, 0, s, a.dout, a.out, a.delta);
  PG_CUDA_LAUNCH(q, (attention_dquery<TILE, D, T>), dim3((unsigned)blocks), THREADS, four, s,
                 a.dout, a.query, a.key, a.value, a.lse, a.delta, a.dquery);
  PG_CUDA_LAUNCH(q, (attention_dkey_dvalue<TILE, D, T>), dim3((unsigned)blocks), THREADS, four, s,
                 a.dout, a.query, a.key, a.value, a.lse, a.delta, a.dkey, a.dvalue);
  return 0;
}

/* Smaller tiles where shared memory is short: 99 KiB on desktop GPUs, 163 or more on others. */
template <int D, class T> static int fit(pg_queue *q, const shape &s, const call<T> &a) {
  return shared_bytes<64, D>(4) <= q->shared ? run<64, D>(q, s, a) : run<32, D>(q, s, a);
}

template <class T>
static int choose(pg_queue *q, int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                  const call<T> &a) {
  shape s = {};
  s.time = time, s.heads = heads, s.head_dim = head_dim;
  s.ld = heads * head_dim;
  s.sequences = batch * heads;
  s.scale = (float)(1.0 / sqrt((double)head_dim));
  s.wide = pg_wide_rows(a.query, head_dim) && pg_wide_rows(a.key, head_dim) &&
           pg_wide_rows(a.value, head_dim) && pg_wide_rows(a.dout, head_dim);
  if (s.sequences <= 0 || time <= 0) return 0;
  if (head_dim <= 32) return run<64, 32>(q, s, a);
  if (head_dim <= 64) return run<64, 64>(q, s, a);
  if (head_dim <= 96) return fit<96>(q, s, a);
  if (head_dim <= 128) return fit<128>(q, s, a);
  if (head_dim <= 256) return run<32, 256>(q, s, a);
  return pg_cuda_refuse(q, "head_dim is %lld; attention goes up to 256", (long long)head_dim);
}

int pg__cuda_plain_attention(pg_queue *q, int64_t batch, int64_t time, int64_t heads,
                             int64_t head_dim) {
  call<float> a = {};
  a.ask = true;
  return choose(q, batch, time, heads, head_dim, a);
}

template <class T>
static int forward(pg_queue *q, const void *query, const void *key, const void *value,
                   int64_t batch, int64_t time, int64_t heads, int64_t head_dim, void *out,
                   float *lse) {
  call<T> a = {};
  a.query = (const T *)query, a.key = (const T *)key, a.value = (const T *)value;
  a.result = (T *)out, a.lse = lse;
  return choose(q, batch, time, heads, head_dim, a);
}

template <class T>
static int backward(pg_queue *q, const void *dout, const void *query, const void *key,
                    const void *value, const void *out, const float *lse, int64_t batch,
                    int64_t time, int64_t heads, int64_t head_dim, void *dquery, void *dkey,
                    void *dvalue) {
  call<T> a = {};
  void *delta;
  if (pg_cuda_scratch(q, (size_t)(batch * heads * time) * sizeof(float), &delta) < 0) return -1;
  a.query = (const T *)query, a.key = (const T *)key, a.value = (const T *)value;
  a.dout = (const T *)dout, a.out = (const T *)out;
  a.lse = (float *)lse; /* only read */
  a.delta = (float *)delta;
  a.dquery = (T *)dquery, a.dkey = (T *)dkey, a.dvalue = (T *)dvalue;
  return choose(q, batch, time, heads, head_dim, a);
}

int pg_cuda_attention_forward(pg_queue *q, pg_dtype type, const void *query, const void *key,
                              const void *value, int64_t batch, int64_t time, int64_t heads,
                              int64_t head_dim, void *out, float *lse) {
  pg_cudnn_tensors t = {};
  t.query = (void *)query, t.key = (void *)key, t.value = (void *)value; /* only read */
  t.out = out, t.lse = lse;
  const int done = pg__cuda_cudnn_attention(q, type, t, batch, time, heads, head_dim);
  if (done) return done < 0 ? -1 : 0;
  PG_CUDA_TYPED(type, T,
                return forward<T>(q, query, key, value, batch, time, heads, head_dim, out, lse));
}

int pg_cuda_attention_backward(pg_queue *q, pg_dtype type, const void *dout, const void *query,
                               const void *key, const void *value, const void *out,
                               const float *lse, int64_t batch, int64_t time, int64_t heads,
                               int64_t head_dim, void *dquery, void *dkey, void *dvalue) {
  pg_cudnn_tensors t = {};
  t.query = (void *)query, t.key = (void *)key, t.value = (void *)value; /* only read */
  t.out = (void *)out, t.lse = (void *)lse, t.dout = (void *)dout;
  t.dquery = dquery, t.dkey = dkey, t.dvalue = dvalue;
  const int done = pg__cuda_cudnn_attention(q, type, t, batch, time, heads, head_dim);
  if (done) return done < 0 ? -1 : 0;
  PG_CUDA_TYPED(type, T,
                return backward<T>(q, dout, query, key, value, out, lse, batch, time, heads,
                                   head_dim, dquery, dkey, dvalue));
}
