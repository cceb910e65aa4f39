/* A transformer block, forward and backward (SPEC §1): x += O attention(norm(x)), then
 * x += down(silu(gate y) * (up y)) with y = norm(x). Residual sums are the products' beta = 1. */
#include "model_internal.h"

int pg__product(pg_context *ctx, double alpha, pg__operand a, pg__operand b, double beta,
                pg_dtype type_c, void *c, int64_t ldc) {
  const pg_gemm g = {.transpose_a = a.transposed,
                     .transpose_b = b.transposed,
                     .m = a.rows,
                     .n = b.columns,
                     .k = a.columns,
                     .alpha = (float)alpha,
                     .beta = (float)beta,
                     .a = a.data,
                     .lda = a.ld,
                     .b = b.data,
                     .ldb = b.ld,
                     .c = c,
                     .ldc = ldc,
                     .type_a = a.type,
                     .type_b = b.type,
                     .type_c = type_c};
  int status;
  PG_LAUNCH(ctx, gemm, &g);
fail:
  return status;
}

int pg__linear(const pg_activations *a, const pg_parameter *w, const void *x, int64_t n, float beta,
               void *out) {
  const int64_t in = w->columns;
  return pg__product(a->context, 1, pg__plain(a->compute, x, n, in, in),
                     pg__transpose(a->compute, pg__weight(w), w->rows, in, in), beta, a->compute,
                     out, w->rows);
}

int pg__linear_backward(const pg_activations *a, const pg_parameter *w, const void *dy,
                        const void *x, int64_t n, float beta, void *dx) {
  const pg_dtype type = a->compute;
  const int64_t in = w->columns, out = w->rows;
  int status;
  PG_TRY(pg__product(a->context, 1, pg__plain(type, dy, n, out, out),
                     pg__plain(type, pg__weight(w), out, in, in), beta, type, dx, in));
  if (w->gradient)
    PG_TRY(pg__product(a->context, 1, pg__transpose(type, dy, n, out, out),
                       pg__plain(type, x, n, in, in), 1, PG_F32, w->gradient->data, in));
fail:
  return status;
}

int pg__block_forward(const pg_model *model, pg_activations *a, int64_t layer, void *output) {
  pg_context *ctx = model->context;
  const pg_model_config *c = &model->config;
  const pg_block_buffers *b = &a->blocks[layer];
  const pg_parameter *w = pg__block_parameter(model, layer, 0);
  int64_t d = c->width, n = a->batch * a->time;
  pg_dtype type = a->compute;
  float eps = (float)c->norm_eps;
  int status, span = pg__enter(ctx, PG__PART_BY_OPERATION, "block forward", layer);

  PG_LAUNCH(ctx, rmsnorm_forward, type, b->input, n, d, eps, a->norm, b->input_rstd);
  PG_TRY(pg__linear(a, &w[PG_Q], a->norm, n, 0, b->q_raw));
  PG_TRY(pg__linear(a, &w[PG_K], a->norm, n, 0, b->k_raw));
  PG_TRY(pg__linear(a, &w[PG_V], a->norm, n, 0, b->v));
  PG_LAUNCH(ctx, qk_norm_rope_forward, type, b->q_raw, a->batch, a->time, c->heads, c->head_dim,
            eps, a->cosine, a->sine, b->q, b->q_rstd);
  PG_LAUNCH(ctx, qk_norm_rope_forward, type, b->k_raw, a->batch, a->time, c->heads, c->head_dim,
            eps, a->cosine, a->sine, b->k, b->k_rstd);
  PG_LAUNCH(ctx, attention_forward, type, b->q, b->k, b->v, a->batch, a->time, c->heads,
            c->head_dim, b->attended, b->lse);
  if (b->middle != b->input)
    PG_LAUNCH(ctx, copy, b->middle, b->input, (size_t)(n * d) * pg_dtype_size(type));
  PG_TRY(pg__linear(a, &w[PG_O], b->attended, n, 1, b->middle));

  PG_LAUNCH(ctx, rmsnorm_forward, type, b->middle, n, d, eps, a->norm, b->middle_rstd);
  PG_TRY(pg__linear(a, &w[PG_GATE], a->norm, n, 0, b->gate));
  PG_TRY(pg__linear(a, &w[PG_UP], a->norm, n, 0, b->up));
  PG_LAUNCH(ctx, swiglu_forward, type, b->gate, b->up, n * c->mlp, b->product);
  if (!output) goto fail; /* with status 0 */
  if (output != b->middle)
    PG_LAUNCH(ctx, copy, output, b->middle, (size_t)(n * d) * pg_dtype_size(type));
  PG_TRY(pg__linear(a, &w[PG_DOWN], b->product, n, 1, output));
fail:
  pg__leave(ctx, span);
  return status;
}

int pg__block_backward(const pg_model *model, pg_activations *a, int64_t layer) {
  pg_context *ctx = model->context;
  const pg_model_config *c = &model->config;
  const pg_block_buffers *b = &a->blocks[layer];
  const pg_parameter *w = pg__block_parameter(model, layer, 0);
  int64_t d = c->width, n = a->batch * a->time;
  pg_dtype type = a->compute;
  float eps = (float)c->norm_eps;
  int status, span = pg__enter(ctx, PG__PART_BY_OPERATION, "block backward", layer);

  PG_TRY(pg__linear_backward(a, &w[PG_DOWN], a->stream, b->product, n, 0, a->dproduct));
  PG_LAUNCH(ctx, swiglu_backward, type, a->dproduct, b->gate, b->up, n * c->mlp, b->gate, b->up);
  PG_LAUNCH(ctx, rmsnorm_forward, type, b->middle, n, d, eps, a->norm, NULL);
  PG_TRY(pg__linear_backward(a, &w[PG_GATE], b->gate, a->norm, n, 0, a->dnorm));
  PG_TRY(pg__linear_backward(a, &w[PG_UP], b->up, a->norm, n, 1, a->dnorm));
  PG_LAUNCH(ctx, rmsnorm_backward, type, a->dnorm, b->middle, b->middle_rstd, n, d, true,
            a->stream);

  PG_TRY(pg__linear_backward(a, &w[PG_O], a->stream, b->attended, n, 0, a->dattended));
  PG_LAUNCH(ctx, attention_backward, type, a->dattended, b->q, b->k, b->v, b->attended, b->lse,
            a->batch, a->time, c->heads, c->head_dim, a->dq, a->dk, a->dv);
  PG_LAUNCH(ctx, qk_norm_rope_backward, type, a->dq, b->q_raw, b->q_rstd, a->batch, a->time,
            c->heads, c->head_dim, a->cosine, a->sine, a->dq);
  PG_LAUNCH(ctx, qk_norm_rope_backward, type, a->dk, b->k_raw, b->k_rstd, a->batch, a->time,
            c->heads, c->head_dim, a->cosine, a->sine, a->dk);
  PG_LAUNCH(ctx, rmsnorm_forward, type, b->input, n, d, eps, a->norm, NULL);
  PG_TRY(pg__linear_backward(a, &w[PG_Q], a->dq, a->norm, n, 0, a->dnorm));
  PG_TRY(pg__linear_backward(a, &w[PG_K], a->dk, a->norm, n, 1, a->dnorm));
  PG_TRY(pg__linear_backward(a, &w[PG_V], a->dv, a->norm, n, 1, a->dnorm));
  PG_LAUNCH(ctx, rmsnorm_backward, type, a->dnorm, b->input, b->input_rstd, n, d, true, a->stream);
fail:
  pg__leave(ctx, span);
  return status;
}
