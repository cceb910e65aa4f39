/* Every kernel of the table that does work, at the sizes of a model: one case, one launch. Names of
 * sizes as in model_internal.h: N positions, d width, D = heads * head_dim, F mlp, V vocabulary. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>

/* The measured launch and the end of a case; its shape was described before. */
#define TIME(b, op, ...)                                                                           \
  int status;                                                                                      \
  while (pg__bench_next(b, &status)) PG_LAUNCH((b)->context, op, __VA_ARGS__);                     \
  fail:                                                                                            \
  return status

#define SHAPE(b, kind, ...)                                                                        \
  do {                                                                                             \
    (b)->result->type = (kind);                                                                    \
    snprintf((b)->result->shape, sizeof(b)->result->shape, __VA_ARGS__);                           \
  } while (0)

static long long width(const pg__bench *b) {
  return (long long)b->sizes->config.width;
}
static int64_t inner(const pg__bench *b) {
  return b->sizes->config.heads * b->sizes->config.head_dim;
}
static float *floats(pg__bench *b, int64_t n) {
  return pg__bench_zeros(b, (size_t)n * sizeof(float));
}
static float *normal_floats(pg__bench *b, int64_t n, double scale) {
  return pg__bench_normals(b, PG_F32, n, scale);
}
/* An activation to read; one to write. */
static void *input(pg__bench *b, int64_t columns) {
  return pg__bench_normals(b, b->sizes->compute, b->n * columns, 1);
}
static void *output(pg__bench *b, int64_t columns) {
  return pg__bench_zeros(b, (size_t)(b->n * columns) * pg_dtype_size(b->sizes->compute));
}
/* Elements of the head, the largest matrix there is. */
static int64_t head_size(const pg__bench *b) {
  return b->sizes->config.vocab * b->sizes->config.width;
}
/* Rows of logits at once and their leading dimension, about as the activations plan them. */
static int64_t chunk(const pg__bench *b) {
  return pg__min(512, b->n);
}
static int64_t logits_ld(const pg__bench *b) {
  return pg__round_up(b->sizes->config.vocab, 64);
}

/* ---- memory ------------------------------------------------------------------------------- */
static int case_copy(pg__bench *b) {
  const size_t bytes = (size_t)(b->n * width(b)) * pg_dtype_size(b->sizes->compute);
  void *from = input(b, width(b)), *to = output(b, width(b));
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, width(b));
  TIME(b, copy, to, from, bytes);
}
static int case_zero(pg__bench *b) {
  float *x = floats(b, head_size(b));
  SHAPE(b, PG_F32, "%lld x %lld", (long long)b->sizes->config.vocab, width(b));
  TIME(b, zero, x, (size_t)head_size(b) * sizeof *x);
}

/* What a micro-batch sends to the device, and gets from it. */
static int case_upload(pg__bench *b) {
  int32_t *ids = calloc((size_t)b->n, sizeof *ids);
  void *to = pg__bench_zeros(b, (size_t)b->n * sizeof *ids);
  int status = ids ? 0 : pg_fail(b->context, PG_ENOMEM, "no memory for ids");
  SHAPE(b, PG_F32, "%lld", (long long)b->n);
  PG_TRY(status);
  while (pg__bench_next(b, &status))
    PG_LAUNCH(b->context, upload, to, ids, (size_t)b->n * sizeof *ids);
fail:
  free(ids);
  return status;
}
static int case_download(pg__bench *b) {
  float *losses = calloc((size_t)b->n, sizeof *losses);
  const void *from = floats(b, b->n);
  int status = losses ? 0 : pg_fail(b->context, PG_ENOMEM, "no memory for losses");
  SHAPE(b, PG_F32, "%lld", (long long)b->n);
  PG_TRY(status);
  while (pg__bench_next(b, &status))
    PG_LAUNCH(b->context, download, losses, from, (size_t)b->n * sizeof *losses);
fail:
  free(losses);
  return status;
}

/* ---- dense products ----------------------------------------------------------------------- */
typedef struct operand {
  bool transposed;
  int64_t ld; /* 0: no padding */
} operand;
/* C [m, n] = op(A) op(B); a gradient of weights is added to. */
static int product(pg__bench *b, const char *what, operand a, bool transpose_b, int64_t m,
                   int64_t n, int64_t k, pg_dtype type_c, int64_t ldc) {
  const pg_dtype type = b->sizes->compute;
  pg_gemm g = {.transpose_a = a.transposed,
               .transpose_b = transpose_b,
               .m = m,
               .n = n,
               .k = k,
               .alpha = 1,
               .beta = a.transposed ? 1 : 0,
               .lda = a.ld           ? a.ld
                      : a.transposed ? m
                                     : k,
               .ldb = transpose_b ? k : n,
               .ldc = ldc ? ldc : n,
               .type_a = type,
               .type_b = type,
               .type_c = type_c};
  g.a = pg__bench_normals(b, type, (a.transposed ? k : m) * g.lda, 1);
  g.b = pg__bench_normals(b, type, k * n, 0.02);
  g.c = pg__bench_zeros(b, (size_t)(m * g.ldc) * pg_dtype_size(type_c));
  SHAPE(b, type, "%s: %lld x %lld x %lld", what, (long long)m, (long long)n, (long long)k);
  TIME(b, gemm, &g);
}
static const operand plain, transposed = {.transposed = true};

static int case_gemm_query(pg__bench *b) {
  return product(b, "query", plain, true, b->n, inner(b), width(b), b->sizes->compute, 0);
}
static int case_gemm_up(pg__bench *b) {
  return product(b, "up", plain, true, b->n, b->sizes->config.mlp, width(b), b->sizes->compute, 0);
}
static int case_gemm_down(pg__bench *b) {
  return product(b, "down", plain, true, b->n, width(b), b->sizes->config.mlp, b->sizes->compute,
                 0);
}
static int case_gemm_up_input(pg__bench *b) {
  return product(b, "d input of up", plain, false, b->n, width(b), b->sizes->config.mlp,
                 b->sizes->compute, 0);
}
static int case_gemm_up_weight(pg__bench *b) {
  return product(b, "d weight of up", transposed, false, b->sizes->config.mlp, width(b), b->n,
                 PG_F32, 0);
}
/* The gradient of the logits lies where the logits were. */
static operand logits_gradient(const pg__bench *b, bool transpose) {
  const operand a = {transpose, (b->sizes->compute == PG_BF16 ? 2 : 1) * logits_ld(b)};
  return a;
}
static int case_gemm_logits(pg__bench *b) {
  return product(b, "logits", plain, true, chunk(b), b->sizes->config.vocab, width(b), PG_F32,
                 logits_ld(b));
}
static int case_gemm_head_input(pg__bench *b) {
  return product(b, "d input of head", logits_gradient(b, false), false, chunk(b), width(b),
                 b->sizes->config.vocab, b->sizes->compute, 0);
}
static int case_gemm_head_weight(pg__bench *b) {
  return product(b, "d weight of head", logits_gradient(b, true), false, b->sizes->config.vocab,
                 width(b), chunk(b), PG_F32, 0);
}
/* X X^T of Newton-Schulz for several matrices at once. */
static int case_gemm_gram(pg__bench *b) {
  const int64_t d = b->sizes->config.width;
  const int64_t batch = pg__max(1, pg__min(16, 4 * b->sizes->config.layers));
  pg_gemm g = {.transpose_b = true,
               .m = d,
               .n = d,
               .k = d,
               .alpha = 1,
               .lda = d,
               .ldb = d,
               .ldc = d,
               .batch = batch,
               .stride_a = d * d,
               .stride_b = d * d,
               .stride_c = d * d};
  g.a = g.b = normal_floats(b, batch * d * d, 1);
  g.c = floats(b, batch * d * d);
  SHAPE(b, PG_F32, "Newton-Schulz: %lld times %lld x %lld x %lld", (long long)batch, (long long)d,
        (long long)d, (long long)d);
  TIME(b, gemm, &g);
}

/* ---- transformer -------------------------------------------------------------------------- */
static int case_embedding_forward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const int32_t *ids = pg__bench_ids(b, b->n, c->vocab);
  const void *weight = pg__bench_normals(b, b->sizes->compute, head_size(b), 1);
  void *out = output(b, c->width);
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, width(b));
  TIME(b, embedding_forward, b->sizes->compute, ids, b->n, weight, c->width, out);
}
static int case_embedding_backward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const int32_t *ids = pg__bench_ids(b, b->n, c->vocab);
  const void *dout = input(b, c->width);
  float *gradient = floats(b, head_size(b));
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, width(b));
  TIME(b, embedding_backward, b->sizes->compute, ids, b->n, dout, c->width, c->vocab, gradient);
}
static int case_rmsnorm_forward(pg__bench *b) {
  const void *x = input(b, width(b));
  void *y = output(b, width(b));
  float *rstd = floats(b, b->n);
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, width(b));
  TIME(b, rmsnorm_forward, b->sizes->compute, x, b->n, width(b), 1e-6f, y, rstd);
}
static int case_rmsnorm_backward(pg__bench *b) {
  const void *dy = input(b, width(b)), *x = input(b, width(b));
  const float *rstd = normal_floats(b, b->n, 1);
  void *dx = output(b, width(b));
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, width(b));
  TIME(b, rmsnorm_backward, b->sizes->compute, dy, x, rstd, b->n, width(b), true, dx);
}
static int case_qk_norm_rope_forward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const void *x = input(b, inner(b));
  const float *angles = normal_floats(b, c->context * c->head_dim, 0.5);
  void *y = output(b, inner(b));
  float *rstd = floats(b, b->n * c->heads);
  SHAPE(b, b->sizes->compute, "%lld x %lld x %lld", (long long)b->n, (long long)c->heads,
        (long long)c->head_dim);
  TIME(b, qk_norm_rope_forward, b->sizes->compute, x, b->sizes->batch, c->context, c->heads,
       c->head_dim, 1e-6f, angles, angles, y, rstd);
}
static int case_qk_norm_rope_backward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const void *dy = input(b, inner(b)), *x = input(b, inner(b));
  const float *angles = normal_floats(b, c->context * c->head_dim, 0.5);
  const float *rstd = normal_floats(b, b->n * c->heads, 1);
  void *dx = output(b, inner(b));
  SHAPE(b, b->sizes->compute, "%lld x %lld x %lld", (long long)b->n, (long long)c->heads,
        (long long)c->head_dim);
  TIME(b, qk_norm_rope_backward, b->sizes->compute, dy, x, rstd, b->sizes->batch, c->context,
       c->heads, c->head_dim, angles, angles, dx);
}

typedef struct attention {
  void *query, *key, *value, *out;
  float *lse;
} attention;
static attention attend(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  attention a = {input(b, inner(b)), input(b, inner(b)), input(b, inner(b)), output(b, inner(b)),
                 floats(b, b->n * c->heads)};
  SHAPE(b, b->sizes->compute, "%lld x %lld x %lld x %lld", (long long)b->sizes->batch,
        (long long)c->context, (long long)c->heads, (long long)c->head_dim);
  return a;
}
static int case_attention_forward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const attention a = attend(b);
  TIME(b, attention_forward, b->sizes->compute, a.query, a.key, a.value, b->sizes->batch,
       c->context, c->heads, c->head_dim, a.out, a.lse);
}
/* The backward pass needs the forward's results. */
static int fill(pg__bench *b, const attention *a) {
  const pg_model_config *c = &b->sizes->config;
  int status = b->status;
  if (status < 0) return status;
  PG_LAUNCH(b->context, attention_forward, b->sizes->compute, a->query, a->key, a->value,
            b->sizes->batch, c->context, c->heads, c->head_dim, a->out, a->lse);
fail:
  return b->status = status;
}
static int case_attention_backward(pg__bench *b) {
  const pg_model_config *c = &b->sizes->config;
  const attention a = attend(b);
  const void *dout = input(b, inner(b));
  void *dq = output(b, inner(b)), *dk = output(b, inner(b)), *dv = output(b, inner(b));
  fill(b, &a);
  TIME(b, attention_backward, b->sizes->compute, dout, a.query, a.key, a.value, a.out, a.lse,
       b->sizes->batch, c->context, c->heads, c->head_dim, dq, dk, dv);
}
static int case_swiglu_forward(pg__bench *b) {
  const int64_t f = b->sizes->config.mlp;
  const void *gate = input(b, f), *up = input(b, f);
  void *y = output(b, f);
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, (long long)f);
  TIME(b, swiglu_forward, b->sizes->compute, gate, up, b->n * f, y);
}
static int case_swiglu_backward(pg__bench *b) {
  const int64_t f = b->sizes->config.mlp;
  const void *dy = input(b, f), *gate = input(b, f), *up = input(b, f);
  void *dgate = output(b, f), *dup = output(b, f);
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)b->n, (long long)f);
  TIME(b, swiglu_backward, b->sizes->compute, dy, gate, up, b->n * f, dgate, dup);
}
/* In bf16 the gradient takes the place of half the logits, whose other half then are no numbers to
 * go on with: every repeat starts from fresh ones. */
static int case_cross_entropy(pg__bench *b) {
  const int64_t rows = chunk(b), vocab = b->sizes->config.vocab, ld = logits_ld(b);
  const size_t bytes = (size_t)(rows * ld) * sizeof(float);
  const int32_t *targets = pg__bench_ids(b, rows, vocab);
  const float *fresh = normal_floats(b, rows * ld, 1);
  float *logits = floats(b, rows * ld), *losses = floats(b, rows);
  int status;
  SHAPE(b, b->sizes->compute, "%lld x %lld", (long long)rows, (long long)vocab);
  while (pg__bench_next(b, &status)) {
    PG_LAUNCH(b->context, copy, logits, fresh, bytes);
    PG_LAUNCH(b->context, zero, b->sweep, b->sweep_bytes);
    PG_LAUNCH(b->context, cross_entropy, b->sizes->compute, logits, rows, vocab, ld, targets, 1, 1,
              true, losses);
  }
fail:
  return status;
}
static int case_row_range(pg__bench *b) {
  const int64_t rows = chunk(b), vocab = b->sizes->config.vocab, ld = logits_ld(b);
  const float *logits = normal_floats(b, rows * ld, 1);
  float *ranges = floats(b, rows);
  SHAPE(b, PG_F32, "%lld x %lld", (long long)rows, (long long)vocab);
  TIME(b, row_range, logits, rows, vocab, ld, ranges);
}

/* ---- sums, norm and clip, optimizers ------------------------------------------------------- */
static void head_shape(pg__bench *b) {
  SHAPE(b, PG_F32, "%lld x %lld", (long long)b->sizes->config.vocab, width(b));
}
static int case_sum(pg__bench *b) {
  const float *x = normal_floats(b, head_size(b), 1);
  double *sum = pg__bench_zeros(b, sizeof *sum);
  head_shape(b);
  TIME(b, sum, x, head_size(b), true, sum);
}
static int case_clip_factor(pg__bench *b) {
  const int64_t count = 2 + 7 * b->sizes->config.layers;
  const double *sums = pg__bench_zeros(b, (size_t)count * sizeof *sums);
  pg_clip *clip = pg__bench_zeros(b, sizeof *clip);
  SHAPE(b, PG_F32, "%lld", (long long)count);
  TIME(b, clip_factor, sums, count, 1, clip);
}
static int case_clip_apply(pg__bench *b) {
  const pg_clip half = {.norm = 2, .factor = 0.5f, .finite = 1};
  float *x = normal_floats(b, head_size(b), 1);
  pg_clip *clip = pg__bench_zeros(b, sizeof *clip);
  head_shape(b);
  if (clip)
    b->status = pg__kernel_status(
        b->context, b->context->kernels->upload(b->context->queue, clip, &half, sizeof half),
        "upload");
  TIME(b, clip_apply, clip, head_size(b), x);
}
/* The head's weights, their bf16 copy when there is one, and the increment, which the head keeps.
 */
static pg_target target(pg__bench *b) {
  pg_target to = {.increment = floats(b, head_size(b)),
                  .value = normal_floats(b, head_size(b), 0.02),
                  .keep = 0.999};
  if (b->sizes->compute == PG_BF16)
    to.copy = pg__bench_zeros(b, (size_t)head_size(b) * sizeof *to.copy);
  head_shape(b);
  return to;
}
static int case_apply(pg__bench *b) {
  const float *x = normal_floats(b, head_size(b), 1);
  const pg_target to = target(b);
  TIME(b, apply, -1e-3, PG_F32, x, head_size(b), 1, &to);
}
static int case_adamw(pg__bench *b) {
  const pg_adamw h = {1e-3, 0.9, 0.999, 1e-10, 10, 1000};
  const float *g = normal_floats(b, head_size(b), 1);
  float *m = floats(b, head_size(b)), *v = floats(b, head_size(b));
  const pg_target to = target(b);
  TIME(b, adamw, &h, g, head_size(b), m, v, &to);
}
static int case_rownorm(pg__bench *b) {
  const pg_rownorm h = {1e-3, 0.95, 1e-8};
  const float *g = normal_floats(b, head_size(b), 1);
  float *momentum = normal_floats(b, head_size(b), 1);
  const pg_target to = target(b);
  TIME(b, rownorm, &h, g, b->sizes->config.vocab, width(b), momentum, &to);
}
/* Muon's, of the up projections of eight blocks. */
static int case_momentum(pg__bench *b) {
  enum { MATRICES = 8 };
  const int64_t n = b->sizes->config.mlp * width(b);
  const float *gradients = normal_floats(b, MATRICES * n, 1), *g[MATRICES];
  float *memory = normal_floats(b, MATRICES * n, 1), *momentum[MATRICES];
  float *x = floats(b, MATRICES * n), *norm = floats(b, MATRICES);
  for (int i = 0; i < MATRICES && b->status == 0; i++) {
    g[i] = gradients + i * n;
    momentum[i] = memory + i * n;
  }
  SHAPE(b, PG_F32, "%d x %lld x %lld", MATRICES, (long long)b->sizes->config.mlp, width(b));
  TIME(b, momentum, 0.95, true, MATRICES, g, momentum, n, x, norm);
}
static int case_signs(pg__bench *b) {
  float *x = floats(b, head_size(b));
  head_shape(b);
  TIME(b, signs, 1, 2, 0, b->sizes->config.vocab, width(b), x);
}
static int case_convert(pg__bench *b) {
  const float *x = normal_floats(b, head_size(b), 1);
  void *y = pg__bench_zeros(b, (size_t)head_size(b) * 2);
  head_shape(b);
  TIME(b, convert, PG_F32, x, PG_BF16, y, head_size(b));
}

/* ---- element-wise operations, reductions --------------------------------------------------- */
static pg_view matrix(pg__bench *b, double scale) {
  float *x = scale > 0 ? normal_floats(b, head_size(b), scale) : floats(b, head_size(b));
  head_shape(b);
  return (pg_view){x, b->sizes->config.width, 1};
}
static int case_binary(pg__bench *b) {
  const pg_view x = matrix(b, 1), y = matrix(b, 1), out = matrix(b, 0);
  TIME(b, binary, PG_ADD, x, y, b->sizes->config.vocab, width(b), out);
}
static int case_scalar(pg__bench *b) {
  const pg_view x = matrix(b, 1), out = matrix(b, 0);
  TIME(b, scalar, PG_MUL, x, 0.5, false, b->sizes->config.vocab, width(b), out);
}
static int case_unary(pg__bench *b) {
  const pg_view x = matrix(b, 1), out = matrix(b, 0);
  TIME(b, unary, PG_SQUARE, x, b->sizes->config.vocab, width(b), out);
}
static int case_lerp(pg__bench *b) {
  const pg_view x = matrix(b, 1), y = matrix(b, 1);
  TIME(b, lerp, x, y, 0.1, b->sizes->config.vocab, width(b));
}
static int reduction(pg__bench *b, const char *what, pg_reduce_op op, int axis) {
  const pg_view x = matrix(b, 1);
  float *out = floats(b, pg__max(b->sizes->config.vocab, b->sizes->config.width));
  SHAPE(b, PG_F32, "%s of %lld x %lld", what, (long long)b->sizes->config.vocab, width(b));
  TIME(b, reduce, op, x, b->sizes->config.vocab, width(b), axis, out);
}
static int case_row_norms(pg__bench *b) {
  return reduction(b, "row norms", PG_NORM, 1);
}
static int case_column_sums(pg__bench *b) {
  return reduction(b, "column sums", PG_SUM, 0);
}
static int case_norm(pg__bench *b) {
  return reduction(b, "norm", PG_NORM, -1);
}

/* ---- geometry ----------------------------------------------------------------------------- */
static int case_center_rows(pg__bench *b) {
  const float *x = normal_floats(b, head_size(b), 1);
  float *y = floats(b, head_size(b));
  head_shape(b);
  TIME(b, center_rows, x, b->sizes->config.vocab, width(b), y);
}
/* Rows of different lengths, like those of an increment. */
/* Rows of very different norms. */
static int rows_of_all_lengths(pg__bench *b, pg_view *out) {
  const int64_t rows = b->sizes->config.vocab;
  const pg_view x = matrix(b, 1), lengths = {normal_floats(b, rows, 0.5), 1, 0};
  int status = b->status;
  PG_TRY(status);
  PG_LAUNCH(b->context, unary, PG_EXP, lengths, rows, 1, lengths);
  PG_LAUNCH(b->context, binary, PG_MUL, x, lengths, rows, width(b), x);
fail:
  *out = x;
  return status;
}

static int case_diameter(pg__bench *b) {
  pg_farthest found;
  pg_view x;
  int status = rows_of_all_lengths(b, &x);
  PG_TRY(status);
  while (pg__bench_next(b, &status))
    PG_LAUNCH(b->context, diameter, x.data, b->sizes->config.vocab, width(b), &b->context->cancel,
              &found);
fail:
  return status;
}

/* Of at most 4096 rows: it is a diagnostic on demand, and all pairs of a vocabulary take long. */
static int case_separation(pg__bench *b) {
  const int64_t rows = b->sizes->config.vocab < 4096 ? b->sizes->config.vocab : 4096;
  pg_farthest found;
  pg_view x;
  int status = rows_of_all_lengths(b, &x);
  PG_TRY(status);
  while (pg__bench_next(b, &status))
    PG_LAUNCH(b->context, separation, x.data, rows, width(b), &b->context->cancel, &found);
fail:
  return status;
}

const pg__bench_case pg__bench_cases[] = {
    {case_upload},
    {case_download},
    {case_copy},
    {case_zero},
    {case_gemm_query},
    {case_gemm_up},
    {case_gemm_down},
    {case_gemm_up_input},
    {case_gemm_up_weight},
    {case_gemm_logits},
    {case_gemm_head_input},
    {case_gemm_head_weight},
    {case_gemm_gram},
    {case_embedding_forward},
    {case_embedding_backward},
    {case_rmsnorm_forward},
    {case_rmsnorm_backward},
    {case_qk_norm_rope_forward},
    {case_qk_norm_rope_backward},
    {case_attention_forward},
    {case_attention_backward},
    {case_swiglu_forward},
    {case_swiglu_backward},
    {case_cross_entropy},
    {case_row_range},
    {case_sum},
    {case_clip_factor},
    {case_clip_apply},
    {case_apply},
    {case_adamw},
    {case_rownorm},
    {case_momentum},
    {case_signs},
    {case_convert},
    {case_binary},
    {case_scalar},
    {case_unary},
    {case_lerp},
    {case_row_norms},
    {case_column_sums},
    {case_norm},
    {case_center_rows},
    {case_diameter},
    {case_separation},
};
const size_t pg__bench_case_count = PG_COUNT(pg__bench_cases);
