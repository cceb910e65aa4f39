/* The costs of cost.h, one function for each operation of the table and in its order. */
#include "cost.h"

/* The functions have the kernels' types and read few of their arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

static int add(pg_queue *q, double bytes, double flops) {
  pg_cost *cost = (pg_cost *)q;
  cost->bytes += bytes;
  cost->flops += flops;
  return 0;
}

/* Bytes of n elements. */
static double of(pg_dtype type, double n) {
  return n * (type == PG_BF16 ? 2 : type == PG_F64 ? 8 : 4);
}

/* ---- memory ---------------------------------------------------------------------------- */
static int cost_alloc(pg_queue *q, size_t bytes, void **out) {
  return 0;
}
static void cost_release(pg_queue *q, void *memory) {}
static int cost_upload(pg_queue *q, void *device, const void *host, size_t bytes) {
  return add(q, 2 * (double)bytes, 0);
}
static int cost_upload_beside(pg_queue *q, void *device, const void *host, size_t bytes) {
  return add(q, 2 * (double)bytes, 0);
}
static int cost_join(pg_queue *q) {
  return 0;
}
static int cost_download(pg_queue *q, void *host, const void *device, size_t bytes) {
  return add(q, 2 * (double)bytes, 0);
}
static int cost_copy(pg_queue *q, void *to, const void *from, size_t bytes) {
  return add(q, 2 * (double)bytes, 0);
}
static int cost_zero(pg_queue *q, void *memory, size_t bytes) {
  return add(q, (double)bytes, 0);
}
static int cost_synchronize(pg_queue *q) {
  return 0;
}
static int cost_device_info(pg_queue *q, pg_device_info *out) {
  return 0;
}
static int cost_workspace(pg_queue *q, const pg_workload *work, int64_t *bytes) {
  return 0;
}
static int cost_timestamp(pg_queue *q, int64_t index) {
  return 0;
}
static int cost_elapsed(pg_queue *q, int64_t count, double *seconds) {
  return 0;
}
static int cost_peak(pg_queue *q, pg_dtype type, double *flops) {
  return 0;
}

/* ---- dense products -------------------------------------------------------------------- */
static int cost_gemm(pg_queue *q, const pg_gemm *g) {
  const double m = (double)g->m, n = (double)g->n, k = (double)g->k;
  const double batch = g->batch > 1 ? (double)g->batch : 1;
  return add(q,
             batch * (of(g->type_a, m * k) + of(g->type_b, k * n) +
                      of(g->type_c, m * n) * (g->beta != 0 ? 2 : 1)),
             batch * 2 * m * n * k);
}

/* ---- transformer ----------------------------------------------------------------------- */
/* Of the embedding the rows that occur: at most n. */
static int cost_embedding_forward(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                                  const void *weight, int64_t d, void *out) {
  return add(q, 4 * (double)n + of(type, 2 * (double)(n * d)), 0);
}
static int cost_embedding_backward(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                                   const void *dout, int64_t d, int64_t vocab, float *dweight) {
  const double rows = (double)(n < vocab ? n : vocab);
  return add(q, 4 * (double)n + of(type, (double)(n * d)) + of(PG_F32, 2 * rows * (double)d), 0);
}
static int cost_rmsnorm_forward(pg_queue *q, pg_dtype type, const void *x, int64_t n, int64_t d,
                                float eps, void *y, float *rstd) {
  return add(q, of(type, 2 * (double)(n * d)) + (rstd ? 4 * (double)n : 0), 0);
}
static int cost_rmsnorm_backward(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                 const float *rstd, int64_t n, int64_t d, bool plus, void *dx) {
  return add(q, of(type, (plus ? 4 : 3) * (double)(n * d)) + 4 * (double)n, 0);
}
static int cost_qk_norm_rope_forward(pg_queue *q, pg_dtype type, const void *x, int64_t batch,
                                     int64_t time, int64_t heads, int64_t head_dim, float eps,
                                     const float *cosine, const float *sine, void *y, float *rstd) {
  const double n = (double)(batch * time * heads);
  return add(q, of(type, 2 * n * (double)head_dim) + 4 * n + 4 * (double)(time * head_dim), 0);
}
static int cost_qk_norm_rope_backward(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                      const float *rstd, int64_t batch, int64_t time, int64_t heads,
                                      int64_t head_dim, const float *cosine, const float *sine,
                                      void *dx) {
  const double n = (double)(batch * time * heads);
  return add(q, of(type, 3 * n * (double)head_dim) + 4 * n + 4 * (double)(time * head_dim), 0);
}

/* One causal product of the scores' size: half of time x time. */
static double half_product(int64_t batch, int64_t time, int64_t heads, int64_t head_dim) {
  return (double)(batch * heads) * (double)time * (double)(time + 1) * (double)head_dim;
}
/* Scores, and probabilities times values. */
static int cost_attention_forward(pg_queue *q, pg_dtype type, const void *query, const void *key,
                                  const void *value, int64_t batch, int64_t time, int64_t heads,
                                  int64_t head_dim, void *out, float *lse) {
  const double n = (double)(batch * time * heads);
  return add(q, of(type, 4 * n * (double)head_dim) + 4 * n,
             2 * half_product(batch, time, heads, head_dim));
}
/* Scores again, and the gradients of probabilities, values, queries and keys. */
static int cost_attention_backward(pg_queue *q, pg_dtype type, const void *dout, const void *query,
                                   const void *key, const void *value, const void *out,
                                   const float *lse, int64_t batch, int64_t time, int64_t heads,
                                   int64_t head_dim, void *dquery, void *dkey, void *dvalue) {
  const double n = (double)(batch * time * heads);
  return add(q, of(type, 8 * n * (double)head_dim) + 4 * n,
             5 * half_product(batch, time, heads, head_dim));
}
static int cost_attention_path(pg_queue *q, pg_dtype type, int64_t batch, int64_t time,
                               int64_t heads, int64_t head_dim, char *text, size_t size) {
  return 0;
}
static int cost_swiglu_forward(pg_queue *q, pg_dtype type, const void *gate, const void *up,
                               int64_t n, void *y) {
  return add(q, of(type, 3 * (double)n), 0);
}
static int cost_swiglu_backward(pg_queue *q, pg_dtype type, const void *dy, const void *gate,
                                const void *up, int64_t n, void *dgate, void *dup) {
  return add(q, of(type, 5 * (double)n), 0);
}
static int cost_cross_entropy(pg_queue *q, pg_dtype type, float *logits, int64_t n, int64_t vocab,
                              int64_t ld, const int32_t *targets, float logit_scale, float scale,
                              bool gradient, float *loss) {
  const double elements = (double)n * (double)vocab;
  return add(q, 4 * elements + (gradient ? of(type, elements) : 0) + 8 * (double)n, 0);
}
static int cost_row_range(pg_queue *q, const float *z, int64_t n, int64_t vocab, int64_t ld,
                          float *out) {
  return add(q, 4 * (double)n * (double)(vocab + 1), 0);
}

/* ---- sums, norm and clip --------------------------------------------------------------- */
static int cost_sum(pg_queue *q, const float *x, int64_t n, bool square, double *out) {
  return add(q, 4 * (double)n + 8, 0);
}
static int cost_clip_factor(pg_queue *q, const double *sums, int64_t count, double max_norm,
                            pg_clip *out) {
  return add(q, 8 * (double)count + sizeof *out, 0);
}
static int cost_clip_apply(pg_queue *q, const pg_clip *clip, int64_t n, float *x) {
  return add(q, 8 * (double)n, 0);
}

/* ---- optimizers ------------------------------------------------------------------------ */
/* Bytes for each number that goes to `to`. */
static double target(const pg_target *to) {
  return (to->increment ? 4 : 0) + (to->value ? 8 : 0) + (to->copy ? 2 : 0);
}
static int cost_apply(pg_queue *q, double factor, pg_dtype type, const void *x, int64_t n,
                      int64_t count, const pg_target *to) {
  for (int64_t i = 0; i < count; i++) add(q, of(type, (double)n) + target(&to[i]) * (double)n, 0);
  return 0;
}
static int cost_adamw(pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m, float *v,
                      const pg_target *to) {
  return add(q, (20 + target(to)) * (double)n, 0);
}
static int cost_rownorm(pg_queue *q, const pg_rownorm *h, const float *g, int64_t rows,
                        int64_t columns, float *b, const pg_target *to) {
  return add(q, ((g ? 12 : 4) + target(to)) * (double)(rows * columns), 0);
}
static int cost_momentum(pg_queue *q, double mu, bool nesterov, int64_t count,
                         const float *const *g, float *const *b, int64_t n, float *x, float *norm) {
  return add(q, (double)count * (12 * (double)n + (x ? 4 * (double)(n + 1) : 0)), 0);
}
static int cost_signs(pg_queue *q, uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
                      int64_t columns, float *out) {
  return add(q, 4 * (double)rows * (double)columns, 0);
}
static int cost_convert(pg_queue *q, pg_dtype from_type, const void *from, pg_dtype to_type,
                        void *to, int64_t n) {
  return add(q, of(from_type, (double)n) + of(to_type, (double)n), 0);
}

/* ---- element-wise operations, reductions ----------------------------------------------- */
/* Distinct elements of a view. */
static double seen(pg_view view, int64_t rows, int64_t columns) {
  return (view.row_stride ? (double)rows : 1) * (view.column_stride ? (double)columns : 1);
}
static int cost_binary(pg_queue *q, pg_binary_op op, pg_view a, pg_view b, int64_t rows,
                       int64_t columns, pg_view out) {
  return add(
      q, 4 * (seen(a, rows, columns) + seen(b, rows, columns) + (double)rows * (double)columns), 0);
}
static int cost_scalar(pg_queue *q, pg_binary_op op, pg_view a, double scalar, bool reversed,
                       int64_t rows, int64_t columns, pg_view out) {
  return add(q, 4 * (seen(a, rows, columns) + (double)rows * (double)columns), 0);
}
static int cost_unary(pg_queue *q, pg_unary_op op, pg_view a, int64_t rows, int64_t columns,
                      pg_view out) {
  return add(q, 4 * (seen(a, rows, columns) + (double)rows * (double)columns), 0);
}
static int cost_lerp(pg_queue *q, pg_view x, pg_view y, double w, int64_t rows, int64_t columns) {
  return add(q, 4 * (2 * (double)rows * (double)columns + seen(y, rows, columns)), 0);
}
static int cost_reduce(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                       int axis, float *out) {
  const int64_t results = axis == 1 ? rows : axis == 0 ? columns : 1;
  return add(q, 4 * (seen(a, rows, columns) + (double)results), 0);
}

/* ---- geometry -------------------------------------------------------------------------- */
static int cost_center_rows(pg_queue *q, const float *x, int64_t rows, int64_t columns, float *y) {
  return add(q, 8 * (double)rows * (double)columns, 0);
}
static int cost_diameter(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                         const volatile int *cancel, pg_farthest *out) {
  return add(q, 4 * (double)rows * (double)columns, 2 * out->multiply_adds);
}
static int cost_separation(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                           const volatile int *cancel, pg_farthest *out) {
  return cost_diameter(q, x, rows, columns, cancel, out);
}

const pg_kernels pg_cost_kernels = {.name = "cost",
#define PG_KERNEL_ENTRY(op) .op = cost_##op,
                                    PG_KERNELS(PG_KERNEL_ENTRY)
#undef PG_KERNEL_ENTRY
};
