/* The head: logits = logit_scale * U h in chunks of rows, so that all of them never exist at once.
 * Loss and gradient share one path; ranges and single rows serve diagnostics and generation. With
 * U = A B the last matrix is A and reads B h. */
#include "gram.h"
#include "model_internal.h"

#include <stdlib.h>

/* a->logits[rows, classes] = alpha * x M^T in fp32, x [rows, d] and M [classes, d] of one type. */
static int chunk_logits(pg_activations *a, pg_dtype type, const void *x, int64_t d,
                        const void *matrix, int64_t row_stride, int64_t rows, double alpha) {
  return pg__product(a->context, alpha, pg__plain(type, x, rows, d, d),
                     pg__transpose(type, matrix, pg_model_classes(&a->config), d, row_stride), 0,
                     NULL, PG_F32, a->logits, a->logits_ld);
}

/* Row `position` of the last forward's hidden states. */
static const void *hidden_at(const pg_activations *a, int64_t position) {
  return pg__element(a->compute, a->hidden, position * a->config.width);
}

/* *x = what the head's last matrix reads at these positions: their hidden states, or B h. */
static int chunk_input(const pg_model *model, pg_activations *a, int64_t first, int64_t rows,
                       const void **x) {
  const pg_parameter *inner = pg_model_head_inner(model);
  *x = hidden_at(a, first);
  if (!inner) return 0;
  const void *hidden = *x;
  *x = a->inner;
  return pg__linear(a, inner, hidden, rows, NULL, a->inner);
}

/* The same in fp32 from the weights themselves, whatever the compute type is. */
static int chunk_wide_input(const pg_model *model, pg_activations *a, int64_t first, int64_t rows,
                            const void **x) {
  pg_context *ctx = a->context;
  const pg_parameter *inner = pg_model_head_inner(model);
  const int64_t d = a->config.width;
  int status = 0;
  *x = hidden_at(a, first);
  if (a->compute != PG_F32) {
    PG_LAUNCH(ctx, convert, a->compute, *x, PG_F32, a->wide, rows * d);
    *x = a->wide;
  }
  if (inner) {
    PG_TRY(pg__product(ctx, 1, pg__plain(PG_F32, *x, rows, d, d),
                       pg__transpose(PG_F32, inner->value->data, inner->rows, d, d), 0, NULL,
                       PG_F32, a->inner, inner->rows));
    *x = a->inner;
  }
fail:
  return status;
}

/* The projection of dh [rows, d] onto what the backward pass keeps: dh <- (dh Q^T) Q. */
static int narrow(const pg_model *model, pg_activations *a, void *dh, int64_t rows) {
  pg_context *ctx = a->context;
  const pg_dtype type = a->compute;
  const pg_tensor *basis = type == PG_F32 ? model->basis : model->basis_copy;
  const int64_t kept = basis->shape[0], d = basis->shape[1];
  int status;
  PG_TRY(pg__product(ctx, 1, pg__plain(type, dh, rows, d, d),
                     pg__transpose(type, basis->data, kept, d, d), 0, NULL, type, a->projected,
                     kept));
  PG_TRY(pg__product(ctx, 1, pg__plain(type, a->projected, rows, kept, kept),
                     pg__plain(type, basis->data, kept, d, d), 0, NULL, type, dh, d));
fail:
  return status;
}

/* a->logits holds dlogits g of the chunk in the compute type, x is what the last matrix W read:
 * dx = g W, dW += g^T x, or, without the residual, only M += dx^T x (add_projected). From dx on to
 * dh, through B and the subspace of the backward pass where there are such. */
static int chunk_backward(const pg_model *model, pg_activations *a, const void *x, int64_t first,
                          int64_t rows) {
  pg_context *ctx = a->context;
  const pg_parameter *head = pg_model_head(model), *inner = pg_model_head_inner(model);
  const pg_dtype type = a->compute;
  const int64_t d = head->columns, classes = head->rows;
  const int64_t ld = type == PG_BF16 ? 2 * a->logits_ld : a->logits_ld;
  void *dh = pg__element(type, a->dnorm, first * a->config.width), *dx = inner ? a->dinner : dh;
  int status;
  PG_TRY(pg__product(ctx, 1, pg__plain(type, a->logits, rows, classes, ld),
                     pg__plain(type, pg__weight(head), classes, d, d), 0, NULL, type, dx, d));
  if (head->gradient && a->moment)
    PG_TRY(pg__product(ctx, 1, pg__transpose(type, dx, rows, d, d), pg__plain(type, x, rows, d, d),
                       first > 0, NULL, PG_F32, a->moment, d));
  else if (head->gradient)
    PG_TRY(pg__product(ctx, 1, pg__transpose(type, a->logits, rows, classes, ld),
                       pg__plain(type, x, rows, d, d), 1, NULL, PG_F32, head->gradient->data, d));
  if (inner) PG_TRY(pg__linear_backward(a, inner, dx, hidden_at(a, first), rows, 0, dh));
  if (model->basis) PG_TRY(narrow(model, a, dh, rows));
fail:
  return status;
}

/* The gradient of the last matrix W without the residual: dW += W (W^T W)^-1 M with M = W^T g x^T
 * of all positions. */
static int add_projected(const pg_parameter *head, pg_activations *a) {
  pg_context *ctx = a->context;
  const int64_t d = head->columns;
  const size_t count = (size_t)(d * d);
  double *gram = malloc(2 * count * sizeof *gram);
  float *moment = malloc(count * sizeof *moment);
  int status;
  if (!gram || !moment) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to project the head's gradient"));
  double *solved = gram + count;
  PG_TRY(pg__gram(head->value, false, gram));
  PG_TRY(pg__gram_factor(ctx, gram, d, "the head, whose residual is off", NULL));
  PG_LAUNCH(ctx, download, moment, a->moment, count * sizeof *moment);
  for (size_t i = 0; i < count; i++) solved[i] = (double)moment[i];
  pg__gram_solve(ctx, gram, d, solved, d);
  for (size_t i = 0; i < count; i++) moment[i] = (float)solved[i];
  PG_LAUNCH(ctx, upload, a->moment, moment, count * sizeof *moment);
  PG_TRY(pg__product(ctx, 1, pg__plain(PG_F32, head->value->data, head->rows, d, d),
                     pg__plain(PG_F32, a->moment, d, d, d), 1, NULL, PG_F32, head->gradient->data,
                     d));
fail:
  free(gram);
  free(moment);
  return status;
}

static int need_hidden(const pg_model *model, const pg_activations *a) {
  if (a->stage != PG_STAGE_NONE) return pg__activations_check(model, a);
  return pg_fail(a->context, PG_ESTATE, "the head needs a successful pg_model_forward before it");
}

int pg__head_loss(const pg_model *model, pg_activations *a, const int32_t *targets,
                  double gradient_scale, double *loss_sum) {
  pg_context *ctx = model->context;
  const pg_parameter *head = pg_model_head(model);
  bool gradient = gradient_scale != 0;
  int64_t n = a->batch * a->time;
  int status, span = -1;
  PG_TRY(need_hidden(model, a));
  if (gradient && a->keep == PG_KEEP_NOTHING)
    return pg_fail(ctx, PG_EINVAL,
                   "a gradient of the loss needs activations that keep something for it");
  if (gradient && a->stage == PG_STAGE_CONSUMED)
    return pg_fail(ctx, PG_ESTATE,
                   "a gradient of the loss after pg_model_backward needs a new pg_model_forward");
  PG_TRY(pg__check_ids(ctx, targets, n, model->config.vocab, "target"));
  span = pg__enter(ctx, PG_PART_HEAD, "head", -1);
  PG_TRY(pg__bring_ids(ctx, targets, n, a->targets));
  pg__at(ctx, head->name, 0);
  for (int64_t first = 0; first < n; first += a->chunk) {
    int64_t rows = pg__min(a->chunk, n - first);
    const void *x;
    PG_TRY(chunk_input(model, a, first, rows, &x));
    PG_TRY(chunk_logits(a, a->compute, x, head->columns, pg__weight(head), head->columns, rows, 1));
    PG_LAUNCH(ctx, cross_entropy, a->compute, a->logits, rows, head->rows, a->logits_ld,
              a->targets[0] + first, (float)model->config.logit_scale, (float)gradient_scale,
              gradient, a->losses + first);
    if (gradient) PG_TRY(chunk_backward(model, a, x, first, rows));
  }
  if (gradient && head->gradient && a->moment) PG_TRY(add_projected(head, a));
  PG_LAUNCH(ctx, sum, a->losses, n, false, loss_sum);
  if (gradient) a->stage = PG_STAGE_GRADIENT;
fail:
  pg__leave(ctx, span);
  return status;
}

int pg_head_loss(const pg_model *model, pg_activations *a, const int32_t *targets,
                 double gradient_scale, double *loss_sum, float *losses) {
  pg_context *ctx = model->context;
  int status;
  PG_TRY(pg__head_loss(model, a, targets, gradient_scale, a->loss_sum));
  if (losses)
    PG_LAUNCH(ctx, download, losses, a->losses, (size_t)(a->batch * a->time) * sizeof *losses);
  PG_LAUNCH(ctx, download, loss_sum, a->loss_sum, sizeof *loss_sum);
fail:
  return status;
}

int pg_head_ranges(const pg_model *model, pg_activations *a, const pg_tensor *matrix, int64_t first,
                   int64_t count, float *range) {
  pg_context *ctx = model->context;
  const pg_model_config *c = &model->config;
  const int64_t n = a->batch * a->time, classes = pg_model_classes(c);
  int status;
  PG_TRY(need_hidden(model, a));
  if (matrix->context != ctx || matrix->dtype != PG_F32 || matrix->ndim != 2 ||
      matrix->shape[0] != classes || matrix->shape[1] != c->width || matrix->stride[1] != 1 ||
      matrix->stride[0] < c->width)
    return pg_fail(ctx, PG_EINVAL,
                   "ranges need a matrix [%lld, %lld] in F32 with contiguous rows, like the head",
                   (long long)classes, (long long)c->width);
  if (first < 0 || count < 0 || count > n || first > n - count)
    return pg_fail(ctx, PG_EINVAL, "positions %lld to %lld; the last forward had %lld",
                   (long long)first, (long long)(first + count - 1), (long long)n);
  for (int64_t done = 0; done < count; done += a->chunk) {
    int64_t rows = pg__min(a->chunk, count - done);
    const void *hidden = hidden_at(a, first + done);
    if (a->compute != PG_F32) {
      PG_LAUNCH(ctx, convert, a->compute, hidden, PG_F32, a->wide, rows * c->width);
      hidden = a->wide;
    }
    PG_TRY(chunk_logits(a, PG_F32, hidden, c->width, matrix->data, matrix->stride[0], rows,
                        c->logit_scale));
    PG_LAUNCH(ctx, row_range, a->logits, rows, classes, a->logits_ld, a->losses + done);
  }
  PG_LAUNCH(ctx, download, range, a->losses, (size_t)count * sizeof *range);
fail:
  return status;
}

int pg__head_between(const pg_model *from, pg_activations *a, const pg_model *to, pg_activations *b,
                     int64_t count, float *range) {
  pg_context *ctx = to->context;
  const pg_model *models[2] = {to, from};
  pg_activations *activations[2] = {b, a};
  const int64_t chunk = pg__min(a->chunk, b->chunk);
  int status;
  PG_TRY(need_hidden(from, a));
  PG_TRY(need_hidden(to, b));
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t rows = pg__min(chunk, count - done);
    for (int i = 0; i < 2; i++) {
      pg_activations *x = activations[i];
      const pg_parameter *head = pg_model_head(models[i]);
      const void *input;
      PG_TRY(chunk_wide_input(models[i], x, done, rows, &input));
      const double scale = i ? -from->config.logit_scale : to->config.logit_scale;
      const int64_t d = head->columns;
      PG_TRY(pg__product(ctx, scale, pg__plain(PG_F32, input, rows, d, d),
                         pg__transpose(PG_F32, head->value->data, head->rows, d, d), i, NULL,
                         PG_F32, b->logits, b->logits_ld));
    }
    PG_LAUNCH(ctx, row_range, b->logits, rows, pg_model_classes(&to->config), b->logits_ld,
              b->losses + done);
  }
  PG_LAUNCH(ctx, download, range, b->losses, (size_t)count * sizeof *range);
fail:
  return status;
}

int pg__head_inputs(const pg_model *model, pg_activations *a, int64_t first, int64_t count,
                    float *host) {
  pg_context *ctx = model->context;
  const void *x;
  int status;
  PG_TRY(need_hidden(model, a));
  PG_TRY(chunk_wide_input(model, a, first, count, &x));
  PG_LAUNCH(ctx, download, host, x, (size_t)(count * pg_model_head(model)->columns) * sizeof *host);
fail:
  return status;
}

int pg__head_rows(const pg_model *model, pg_activations *a, int64_t first, int64_t count,
                  float *host) {
  pg_context *ctx = model->context;
  const pg_parameter *head = pg_model_head(model);
  const int64_t d = head->columns;
  const void *x;
  int status;
  PG_TRY(need_hidden(model, a));
  PG_TRY(chunk_wide_input(model, a, first, count, &x));
  /* Without padding between the rows, which fit all the more. */
  PG_TRY(pg__product(ctx, model->config.logit_scale, pg__plain(PG_F32, x, count, d, d),
                     pg__transpose(PG_F32, head->value->data, head->rows, d, d), 0, NULL, PG_F32,
                     a->logits, head->rows));
  PG_LAUNCH(ctx, download, host, a->logits, (size_t)(count * head->rows) * sizeof *host);
fail:
  return status;
}

int pg_head_logits(const pg_model *model, pg_activations *a, int64_t position, float *logits) {
  pg_context *ctx = model->context;
  const pg_parameter *head = pg_model_head(model);
  int64_t n = a->batch * a->time;
  const void *x;
  int status;
  PG_TRY(need_hidden(model, a));
  if (position < 0 || position >= n)
    return pg_fail(ctx, PG_EINVAL, "position %lld; the last forward had %lld", (long long)position,
                   (long long)n);
  PG_TRY(chunk_input(model, a, position, 1, &x));
  PG_TRY(chunk_logits(a, a->compute, x, head->columns, pg__weight(head), head->columns, 1,
                      model->config.logit_scale));
  PG_LAUNCH(ctx, download, logits, a->logits, (size_t)model->config.vocab * sizeof *logits);
fail:
  return status;
}
