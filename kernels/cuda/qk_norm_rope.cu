/* RMS normalisation of each head vector followed by rotary position embedding (Su et al. 2021),
 * half-split: with (l, r) the halves of the normalised vector, (l c - r s, r c + l s).
 *
 * A head vector is the work of `lanes` neighbours of a warp, a power of two, so that a warp holds
 * 32 / lanes vectors; each lane takes W elements of both halves at a time. */
#include "cuda.cuh"

/* Sum over aligned groups of `lanes` lanes; every lane of the warp calls it. */
static __device__ inline float group_sum(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2)
    value += __shfl_xor_sync(PG_FULL_MASK, value, step);
  return value;
}

struct rope {
  int64_t vectors, time, heads, half; /* vectors = batch * time * heads */
  int32_t lanes, shift;               /* lanes = 2^shift */
};

/* The head vector of this thread, and its place among the lanes. */
static __device__ inline int64_t own_vector(const rope &p, int64_t *lane) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  *lane = thread & (p.lanes - 1);
  return thread >> p.shift;
}
static __device__ inline int64_t position_of(const rope &p, int64_t vector) {
  const int64_t row = pg_quotient(vector, p.heads);
  return row - pg_quotient(row, p.time) * p.time;
}

/* cosine or sine of W element pairs; W is 1 or a multiple of 4. */
template <int W> static __device__ inline void load_angles(const float *from, float (&to)[W]) {
#pragma unroll
  for (int l = 0; l < W; l += 4) {
    float v[4];
    pg_load_wide(from + l, v);
#pragma unroll
    for (int k = 0; k < 4; k++) to[l + k] = v[k];
  }
}
static __device__ inline void load_angles(const float *from, float (&to)[1]) {
  to[0] = *from;
}

/* x, y [vectors, 2 half], rstd [vectors]. y may be x. */
template <class T, int W>
static __global__ void qk_norm_rope_forward(rope p, const float *cosine, const float *sine,
                                            const T *x, float eps, T *y, float *rstd) {
  int64_t lane;
  const int64_t i = own_vector(p, &lane);
  const bool present = i < p.vectors;
  const T *l = x + i * 2 * p.half, *r = l + p.half;
  float sum = 0, u[W], v[W];
  for (int64_t j = lane * W; present && j < p.half; j += p.lanes * W) {
    pg_load_wide(l + j, u);
    pg_load_wide(r + j, v);
#pragma unroll
    for (int k = 0; k < W; k++) sum += u[k] * u[k] + v[k] * v[k];
  }
  sum = group_sum(sum, p.lanes);
  if (!present) return;
  const float scale = 1.0f / sqrtf(sum / (float)(2 * p.half) + eps);
  const int64_t position = position_of(p, i);
  T *to = y + i * 2 * p.half;
  for (int64_t j = lane * W; j < p.half; j += p.lanes * W) {
    float c[W], s[W];
    load_angles(cosine + position * p.half + j, c);
    load_angles(sine + position * p.half + j, s);
    pg_load_wide(l + j, u);
    pg_load_wide(r + j, v);
#pragma unroll
    for (int k = 0; k < W; k++) {
      const float nl = u[k] * scale, nr = v[k] * scale;
      u[k] = nl * c[k] - nr * s[k];
      v[k] = nr * c[k] + nl * s[k];
    }
    pg_store_wide(to + j, u);
    pg_store_wide(to + p.half + j, v);
  }
  if (lane == 0) rstd[i] = scale;
}

/* With dn the rotation of dy by the opposite angle, dx = rstd (dn - x rstd^2 mean(dn . x)). dn is
 * computed twice instead of stored; dx may be dy, since a lane reads a pair before it writes it. */
template <class T, int W>
static __global__ void qk_norm_rope_backward(rope p, const float *cosine, const float *sine,
                                             const T *dy, const T *x, const float *rstd, T *dx) {
  int64_t lane;
  const int64_t i = own_vector(p, &lane);
  const bool present = i < p.vectors;
  const int64_t position = position_of(p, i), at = i * 2 * p.half;
  const float *ci = cosine + position * p.half, *si = sine + position * p.half;
  float dot = 0, m = 0, k = present ? rstd[i] : 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t j = lane * W; present && j < p.half; j += p.lanes * W) {
      float c[W], s[W], dl[W], dr[W], xl[W], xr[W];
      load_angles(ci + j, c);
      load_angles(si + j, s);
      pg_load_wide(dy + at + j, dl);
      pg_load_wide(dy + at + p.half + j, dr);
      pg_load_wide(x + at + j, xl);
      pg_load_wide(x + at + p.half + j, xr);
#pragma unroll
      for (int l = 0; l < W; l++) {
        const float nl = dl[l] * c[l] + dr[l] * s[l], nr = dr[l] * c[l] - dl[l] * s[l];
        if (pass == 0) dot += nl * xl[l] + nr * xr[l];
        dl[l] = k * nl - m * xl[l];
        dr[l] = k * nr - m * xr[l];
      }
      if (pass == 0) continue;
      pg_store_wide(dx + at + j, dl);
      pg_store_wide(dx + at + p.half + j, dr);
    }
    if (pass == 0) m = k * k * k * (group_sum(dot, p.lanes) / (float)(2 * p.half));
  }
}

static rope plan(int64_t batch, int64_t time, int64_t heads, int64_t head_dim, int width) {
  rope p = {batch * time * heads, time, heads, head_dim / 2, 1, 0};
  while (p.lanes < PG_WARP && p.lanes * width < p.half) p.lanes *= 2, p.shift++;
  return p;
}

/* Whether both halves of every vector, and the angles, start at 16 bytes. */
template <class T>
static bool wide(const T *a, const T *b, const T *c, const float *cosine, const float *sine,
                 int64_t half) {
  return pg_wide_rows(a, half) && pg_wide_rows(b, half) && pg_wide_rows(c, half) &&
         pg_wide_aligned(cosine) && pg_wide_aligned(sine);
}

template <class T, int W>
static int forward(pg_queue *q, const rope &p, const float *cosine, const float *sine, const T *x,
                   float eps, T *y, float *rstd) {
  if (p.vectors <= 0) return 0;
  PG_CUDA_LAUNCH(q, (qk_norm_rope_forward<T, W>),
                 dim3((unsigned)pg_blocks(p.vectors * p.lanes, PG_CUDA_BLOCK)), PG_CUDA_BLOCK, 0, p,
                 cosine, sine, x, eps, y, rstd);
  return 0;
}

template <class T, int W>
static int backward(pg_queue *q, const rope &p, const float *cosine, const float *sine, const T *dy,
                    const T *x, const float *rstd, T *dx) {
  if (p.vectors <= 0) return 0;
  PG_CUDA_LAUNCH(q, (qk_norm_rope_backward<T, W>),
                 dim3((unsigned)pg_blocks(p.vectors * p.lanes, PG_CUDA_BLOCK)), PG_CUDA_BLOCK, 0, p,
                 cosine, sine, dy, x, rstd, dx);
  return 0;
}

template <class T>
static int forward_typed(pg_queue *q, const T *x, int64_t batch, int64_t time, int64_t heads,
                         int64_t head_dim, float eps, const float *cosine, const float *sine, T *y,
                         float *rstd) {
  constexpr int W = pg_wide<T>::width;
  if (wide<T>(x, y, y, cosine, sine, head_dim / 2))
    return forward<T, W>(q, plan(batch, time, heads, head_dim, W), cosine, sine, x, eps, y, rstd);
  return forward<T, 1>(q, plan(batch, time, heads, head_dim, 1), cosine, sine, x, eps, y, rstd);
}

template <class T>
static int backward_typed(pg_queue *q, const T *dy, const T *x, const float *rstd, int64_t batch,
                          int64_t time, int64_t heads, int64_t head_dim, const float *cosine,
                          const float *sine, T *dx) {
  constexpr int W = pg_wide<T>::width;
  if (wide<T>(dy, x, dx, cosine, sine, head_dim / 2))
    return backward<T, W>(q, plan(batch, time, heads, head_dim, W), cosine, sine, dy, x, rstd, dx);
  return backward<T, 1>(q, plan(batch, time, heads, head_dim, 1), cosine, sine, dy, x, rstd, dx);
}

int pg_cuda_qk_norm_rope_forward(pg_queue *q, pg_dtype type, const void *x, int64_t batch,
                                 int64_t time, int64_t heads, int64_t head_dim, float eps,
                                 const float *cosine, const float *sine, void *y, float *rstd) {
  PG_CUDA_TYPED(type, T,
                return forward_typed(q, (const T *)x, batch, time, heads, head_dim, eps, cosine,
                                     sine, (T *)y, rstd));
}

int pg_cuda_qk_norm_rope_backward(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                  const float *rstd, int64_t batch, int64_t time, int64_t heads,
                                  int64_t head_dim, const float *cosine, const float *sine,
                                  void *dx) {
  PG_CUDA_TYPED(type, T,
                return backward_typed(q, (const T *)dy, (const T *)x, rstd, batch, time, heads,
                                      head_dim, cosine, sine, (T *)dx));
}
