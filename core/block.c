/* A transformer block, forward and backward (SPEC §1): x += O attention(norm(x)), then
 * x += down(silu(gate y) * (up y)) with y = norm(x). Residual sums are the products' beta = 1. */
#include "model_internal.h"

int pg__linear(const pg_activations *a, const pg_parameter *w, const void *x, int64_t n, float beta,
               void *out) {
  int status;
  pg_gemm g = {.transpose_b = true,
               .m = n,
               .n = w->rows,
               .k = w->columns,
               .alpha = 1,
               .beta = beta,
               .a = x,
               .lda = w->columns,
               .b = pg__weight(w),
               .ldb = w->columns,
               .c = out,
               .ldc = w->rows,
               .type_a = a->compute,
               .type_b = a->compute,
               .type_c = a->compute};
  PG_LAUNCH(a->context, gemm, &g);
fail:
  return status;
}

int pg__linear_backward(const pg_activations *a, const pg_parameter *w, const void *dy,
                        const void *x, int64_t n, float beta, void *dx) {
  int status;
  pg_gemm input = {.m = n,
                   .n = w->columns,
                   .k = w->rows,
                   .alpha = 1,
                   .beta = beta,
                   .a = dy,
                   .lda = w->rows,
                   .b = pg__weight(w),
                   .ldb = w->columns,
                   .c = dx,
                   .ldc = w->columns,
                   .type_a = a->compute,
                   .type_b = a->compute,
                   .type_c = a->compute};
  PG_LAUNCH(a->context, gemm, &input);
  if (!w->gradient) return 0;
  pg_gemm weight = {.transpose_a = true,
                    .m = w->rows,
                    .n = w->columns,
                    .k = n,
                    .alpha = 1,
                    .beta = 1,
                    .a = dy,
                    .lda = w->rows,
                    .b = x,
                    .ldb = w->columns,
                    .c = w->gradient->data,
                    .ldc = w->columns,
                    .type_a = a->compute,
                    .type_b = a->compute,
                    .type_c = PG_F32};
  PG_LAUNCH(a->context, gemm, &weight);
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
  int status;

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
  if (output != b->middle)
    PG_LAUNCH(ctx, copy, output, b->middle, (size_t)(n * d) * pg_dtype_size(type));
  PG_TRY(pg__linear(a, &w[PG_DOWN], b->product, n, 1, output));
fail:
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
  int status;

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
  return status;
}
