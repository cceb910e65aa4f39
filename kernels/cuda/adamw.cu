/* AdamW (Loshchilov and Hutter 2019), one pass over g, m, v and the target. The order of operations
 * is that of the element-wise kernels: see kernels/cpu/adamw.c. */
#include "target.cuh"

struct factors { /* the hyperparameters, each rounded once */
  float keep1, take1, keep2, take2, correction1, correction2, step, eps;
};

static __device__ inline float increment(const factors &f, float g, float *m, float *v) {
  *m = pg_add(pg_mul(f.keep1, *m), pg_mul(f.take1, g));
  *v = pg_add(pg_mul(f.keep2, *v), pg_mul(f.take2, pg_mul(g, g)));
  return pg_div(pg_mul(f.step, pg_mul(*m, f.correction1)),
                pg_add(pg_root(pg_mul(*v, f.correction2)), f.eps));
}

static __global__ void adamw(factors f, const float *g, int64_t n, bool wide, float *m, float *v,
                             pg_cuda_target to) {
  for (PG_STRIDE(quad, (n + 3) / 4)) {
    const int64_t at = quad * 4;
    float gi[4], mi[4], vi[4], wi[4], si[4];
    if (wide && at + 4 <= n) {
      pg_load_wide(g + at, gi);
      pg_load_wide(m + at, mi);
      pg_load_wide(v + at, vi);
      pg_fetch_quad(to, at, wi);
#pragma unroll
      for (int e = 0; e < 4; e++) si[e] = increment(f, gi[e], &mi[e], &vi[e]);
      pg_store_wide(m + at, mi);
      pg_store_wide(v + at, vi);
      pg_deliver_quad(to, at, si, wi);
    } else {
      for (int64_t i = at; i < n && i < at + 4; i++)
        pg_deliver(to, i, increment(f, g[i], m + i, v + i));
    }
  }
}

int pg_cuda_adamw(pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m, float *v,
                  const pg_target *to) {
  const double take1 = 1 - h->beta1, take2 = 1 - h->beta2;
  const pg_cuda_target target = pg_cuda_target_of(to);
  const bool wide = pg_wide_aligned(g) && pg_wide_aligned(m) && pg_wide_aligned(v) && target.wide;
  factors f;
  f.take1 = (float)take1, f.keep1 = (float)(1 - take1);
  f.take2 = (float)take2, f.keep2 = (float)(1 - take2);
  f.correction1 = (float)h->correction1, f.correction2 = (float)h->correction2;
  f.step = (float)-h->lr, f.eps = (float)h->eps;
  if (n == 0) return 0;
  PG_CUDA_LAUNCH(q, adamw, pg_stride_grid(q, pg_blocks(n, 4)), dim3(PG_CUDA_BLOCK), 0, f, g, n,
                 wide, m, v, target);
  return 0;
}
