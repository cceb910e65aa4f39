/* A transformer block, forward and backward (SPEC §1): x += O attention(norm(x)), then
 * x += down(silu(gate y) * (up y)) with y = norm(x).
 *
 * A residual sum is the addend of its product: writing x' the product reads x, and the norm then
 * reads x' and writes y. A norm that also added would read x and the product and write x' and y,
 * after the product had been written: one pass over [N, d] more. */
#include "model_internal.h"

int pg__product(pg_context *ctx, double alpha, pg__operand a, pg__operand b, double beta,
                const void *addend, pg_dtype type_c, void *c, int64_t ldc) {
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
                     .addend = addend,
                     .ldc = ldc,
                     .type_a = a.type,
                     .type_b = b.type,
                     .type_c = type_c};
  int status;
  PG_LAUNCH(ctx, gemm, &g);
fail:
  return status;
}

int pg__linear(const pg_activations *a, const pg_parameter *w, const void *x, int64_t n,
               const void *addend, void *out) {
  const int64_t in = w->columns;
  pg__at(a->context, w->name, 0);
  const int status = pg__product(a->context, 1, pg__plain(a->compute, x, n, in, in),
                                 pg__transpose(a->compute, pg__weight(w), w->rows, in, in),
                                 addend ? 1 : 0, addend, a->compute, out, w->rows);
  pg__at(a->context, NULL, 0);
  return status;
}

int pg__linear_backward(const pg_activations *a, const pg_parameter *w, const void *dy,
                        const void *x, int64_t n, float beta, void *dx) {
  const pg_dtype type = a->compute;
  const int64_t in = w->columns, out = w->rows;
  int status;
  pg__at(a->context, w->name, 0);
  PG_TRY(pg__product(a->context, 1, pg__plain(type, dy, n, out, out),
                     pg__plain(type, pg__weight(w), out, in, in), beta, NULL, type, dx, in));
  if (w->gradient)
    PG_TRY(pg__product(a->context, 1, pg__transpose(type, dy, n, out, out),
                       pg__plain(type, x, n, in, in), 1, NULL, PG_F32, w->gradient->data, in));
fail:
  pg__at(a->context, NULL, 0);
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
  PG_TRY(pg__linear(a, &w[PG_Q], a->norm, n, NULL, b->q_raw));
  PG_TRY(pg__linear(a, &w[PG_K], a->norm, n, NULL, b->k_raw));
  PG_TRY(pg__linear(a, &w[PG_V], a->norm, n, NULL, b->v));
  PG_LAUNCH(ctx, qk_norm_rope_forward, type, b->q_raw, a->batch, a->time, c->heads, c->head_dim,
            eps, a->cosine, a->sine, b->q, b->q_rstd);
  PG_LAUNCH(ctx, qk_norm_rope_forward, type, b->k_raw, a->batch, a->time, c->heads, c->head_dim,
            eps, a->cosine, a->sine, b->k, b->k_rstd);
  PG_LAUNCH(ctx, attention_forward, type, b->q, b->k, b->v, a->batch, a->time, c->heads,
            c->head_dim, b->attended, b->lse);
  PG_TRY(pg__linear(a, &w[PG_O], b->attended, n, b->input, b->middle));

  PG_LAUNCH(ctx, rmsnorm_forward, type, b->middle, n, d, eps, a->norm, b->middle_rstd);
  PG_TRY(pg__linear(a, &w[PG_GATE], a->norm, n, NULL, b->gate));
  PG_TRY(pg__linear(a, &w[PG_UP], a->norm, n, NULL, b->up));
  PG_LAUNCH(ctx, swiglu_forward, type, b->gate, b->up, n * c->mlp, b->product);
  if (!output) goto fail; /* with status 0 */
  PG_TRY(pg__linear(a, &w[PG_DOWN], b->product, n, b->middle, output));
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
