/* The head: logits = logit_scale * U h in chunks of rows, so that all of them never exist at once.
 * Loss and gradient share one path; ranges and single rows serve diagnostics and generation. */
#include "model_internal.h"

/* a->logits[rows, vocab] = alpha * h M^T in fp32, h [rows, d] and M [vocab, d] of one type. */
static int chunk_logits(pg_activations *a, pg_dtype type, const void *hidden, const void *matrix,
                        int64_t row_stride, int64_t rows, double alpha) {
  const int64_t d = a->config.width;
  return pg__product(a->context, alpha, pg__plain(type, hidden, rows, d, d),
                     pg__transpose(type, matrix, a->config.vocab, d, row_stride), 0, NULL, PG_F32,
                     a->logits, a->logits_ld);
}

/* Row `position` of the last forward's hidden states. */
static const void *hidden_at(const pg_activations *a, int64_t position) {
  return pg__element(a->compute, a->hidden, position * a->config.width);
}

/* a->logits holds dlogits of the chunk in the compute type: dh = dlogits U, dU += dlogits^T h. */
static int chunk_backward(const pg_parameter *head, pg_activations *a, int64_t first,
                          int64_t rows) {
  pg_context *ctx = a->context;
  const pg_dtype type = a->compute;
  const int64_t d = head->columns, vocab = head->rows;
  const int64_t ld = type == PG_BF16 ? 2 * a->logits_ld : a->logits_ld;
  int status;
  PG_TRY(pg__product(ctx, 1, pg__plain(type, a->logits, rows, vocab, ld),
                     pg__plain(type, pg__weight(head), vocab, d, d), 0, NULL, type,
                     pg__element(type, a->dnorm, first * d), d));
  if (head->gradient)
    PG_TRY(pg__product(ctx, 1, pg__transpose(type, a->logits, rows, vocab, ld),
                       pg__plain(type, hidden_at(a, first), rows, d, d), 1, NULL, PG_F32,
                       head->gradient->data, d));
fail:
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
    PG_TRY(
        chunk_logits(a, a->compute, hidden_at(a, first), pg__weight(head), head->columns, rows, 1));
    PG_LAUNCH(ctx, cross_entropy, a->compute, a->logits, rows, head->rows, a->logits_ld,
              a->targets[0] + first, (float)model->config.logit_scale, (float)gradient_scale,
              gradient, a->losses + first);
    if (gradient) PG_TRY(chunk_backward(head, a, first, rows));
  }
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
  int64_t n = a->batch * a->time;
  int status;
  PG_TRY(need_hidden(model, a));
  if (matrix->context != ctx || matrix->dtype != PG_F32 || matrix->ndim != 2 ||
      matrix->shape[0] != c->vocab || matrix->shape[1] != c->width || matrix->stride[1] != 1 ||
      matrix->stride[0] < c->width)
    return pg_fail(ctx, PG_EINVAL,
                   "ranges need a matrix [%lld, %lld] in F32 with contiguous rows, like the head",
                   (long long)c->vocab, (long long)c->width);
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
    PG_TRY(chunk_logits(a, PG_F32, hidden, matrix->data, matrix->stride[0], rows, c->logit_scale));
    PG_LAUNCH(ctx, row_range, a->logits, rows, c->vocab, a->logits_ld, a->losses + done);
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
      const void *hidden = hidden_at(x, done);
      if (x->compute != PG_F32) {
        PG_LAUNCH(ctx, convert, x->compute, hidden, PG_F32, x->wide, rows * head->columns);
        hidden = x->wide;
      }
      const double scale = i ? -from->config.logit_scale : to->config.logit_scale;
      const int64_t d = head->columns;
      PG_TRY(pg__product(ctx, scale, pg__plain(PG_F32, hidden, rows, d, d),
                         pg__transpose(PG_F32, head->value->data, head->rows, d, d), i, NULL,
                         PG_F32, b->logits, b->logits_ld));
    }
    PG_LAUNCH(ctx, row_range, b->logits, rows, to->config.vocab, b->logits_ld, b->losses + done);
  }
  PG_LAUNCH(ctx, download, range, b->losses, (size_t)count * sizeof *range);
fail:
  return status;
}

int pg_head_logits(const pg_model *model, pg_activations *a, int64_t position, float *logits) {
  pg_context *ctx = model->context;
  const pg_parameter *head = pg_model_head(model);
  int64_t n = a->batch * a->time;
  int status;
  PG_TRY(need_hidden(model, a));
  if (position < 0 || position >= n)
    return pg_fail(ctx, PG_EINVAL, "position %lld; the last forward had %lld", (long long)position,
                   (long long)n);
  PG_TRY(chunk_logits(a, a->compute, hidden_at(a, position), pg__weight(head), head->columns, 1,
                      model->config.logit_scale));
  PG_LAUNCH(ctx, download, logits, a->logits, (size_t)head->rows * sizeof *logits);
fail:
  return status;
}
