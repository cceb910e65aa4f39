/* The whole model: embedding, blocks and final norm, forward and backward. */
#include "model_internal.h"

int pg_model_forward(const pg_model *model, pg_activations *a, const int32_t *tokens, int64_t batch,
                     int64_t time, const void **hidden) {
  const int status = pg__model_forward_blocks(model, a, tokens, batch, time, NULL, NULL);
  if (hidden) *hidden = status < 0 ? NULL : a->hidden;
  return status;
}

int pg__model_forward_blocks(const pg_model *model, pg_activations *a, const int32_t *tokens,
                             int64_t batch, int64_t time, pg__block_fn *after, void *self) {
  pg_context *ctx = model->context;
  const pg_model_config *c = &model->config;
  const pg_parameter *embedding = pg_model_embedding(model);
  int64_t n;
  int status, place = -1;
  a->model = NULL;
  a->stage = PG_STAGE_NONE;
  PG_TRY(pg__activations_check(model, a));
  if (time < 1 || time > a->max_time)
    return pg_fail(ctx, PG_EINVAL, "time is %lld; allowed: 1 to %lld, as the activations were made",
                   (long long)time, (long long)a->max_time);
  if (batch < 1 || batch > a->capacity / time)
    return pg_fail(ctx, PG_EINVAL,
                   "batch is %lld; allowed: 1 to %lld sequences of %lld tokens, as the activations "
                   "were made",
                   (long long)batch, (long long)(a->capacity / time), (long long)time);
  n = batch * time;
  PG_TRY(pg__check_ids(ctx, tokens, n, c->vocab, "token"));
  a->batch = batch;
  a->time = time;
  place = pg__enter(ctx, PG__PART_BY_OPERATION, "forward", -1);
  PG_TRY(pg__bring_ids(ctx, tokens, n, a->tokens));
  pg__at(ctx, embedding->name, 0);
  PG_LAUNCH(ctx, embedding_forward, a->compute, a->tokens[0], n, pg__weight(embedding), c->width,
            c->layers ? a->blocks[0].input : a->output);
  pg__at(ctx, NULL, 0);
  for (int64_t layer = 0; layer < c->layers; layer++) {
    PG_TRY(pg__block_forward(model, a, layer,
                             layer + 1 < c->layers ? a->blocks[layer + 1].input : a->output));
    if (after) PG_TRY(after(self, layer));
  }
  PG_LAUNCH(ctx, rmsnorm_forward, a->compute, a->output, n, c->width, (float)c->norm_eps, a->hidden,
            a->output_rstd);
  a->model = model;
  a->stage = PG_STAGE_HIDDEN;
fail:
  pg__leave(ctx, place);
  return status;
}

int pg__model_given(const pg_model *model, pg_activations *a, const pg_tensor *states,
                    const void **hidden) {
  pg_context *ctx = model->context;
  const int64_t n = states->shape[0], elements = n * model->config.width;
  int status;
  a->model = NULL;
  a->stage = PG_STAGE_NONE;
  PG_TRY(pg__activations_check(model, a));
  if (a->compute == PG_F32)
    PG_LAUNCH(ctx, copy, a->hidden, states->data, (size_t)elements * sizeof(float));
  else
    PG_LAUNCH(ctx, convert, PG_F32, states->data, a->compute, a->hidden, elements);
  a->batch = n;
  a->time = 1;
  a->model = model;
  a->stage = PG_STAGE_HIDDEN;
  *hidden = a->hidden;
fail:
  return status;
}

/* The first parameter, in the model's order, that wants a gradient: what lies below it is skipped.
 */
static size_t first_trained(const pg_model *model) {
  size_t i = 0;
  while (i < model->count && !model->parameters[i].gradient) i++;
  return i;
}

static int nobody(void *self, size_t index) {
  (void)self, (void)index;
  return 0;
}

static int backward(const pg_model *model, pg_activations *a, pg_ready_fn *ready, void *self) {
  pg_context *ctx = model->context;
  const pg_model_config *c = &model->config;
  int64_t n = a->batch * a->time;
  size_t first = first_trained(model);
  int status = 0;
  /* The blocks' buffers are consumed, so a second backward pass needs a new forward pass. */
  a->stage = PG_STAGE_CONSUMED;
  const size_t head = model->count - (c->head.rank ? 2 : 1);
  if (first >= head) return ready(self, 0); /* nothing below the head is trained */
  PG_TRY(ready(self, head));
  PG_LAUNCH(ctx, rmsnorm_backward, a->compute, a->dnorm, a->output, a->output_rstd, n, c->width,
            false, a->stream);
  for (int64_t layer = c->layers - 1; layer >= 0; layer--) {
    if (first >= 1 + (size_t)(layer + 1) * PG_BLOCK_MATRICES) return ready(self, 0);
    /* The buffers that the blocks share still hold what the last block left in them. */
    if (a->keep == PG_KEEP_INPUTS && layer + 1 < c->layers)
      PG_TRY(pg__block_forward(model, a, layer, NULL));
    PG_TRY(pg__block_backward(model, a, layer));
    PG_TRY(ready(self, 1 + (size_t)layer * PG_BLOCK_MATRICES));
  }
  if (model->parameters[0].gradient) {
    pg__at(ctx, model->parameters[0].name, 0);
    PG_LAUNCH(ctx, embedding_backward, a->compute, a->tokens[0], n, a->stream, c->width, c->vocab,
              model->parameters[0].gradient->data);
  }
  PG_TRY(ready(self, 0));
fail:
  return status;
}

int pg_model_backward_ready(const pg_model *model, pg_activations *a, pg_ready_fn *ready,
                            void *self) {
  pg_context *ctx = model->context;
  if (a->model != model || a->stage != PG_STAGE_GRADIENT)
    return pg_fail(
        ctx, PG_ESTATE,
        "pg_model_backward needs pg_model_forward and pg_head_loss with a gradient scale "
        "before it, once each, on the same model");
  const int place = pg__enter(ctx, PG__PART_BY_OPERATION, "backward", -1);
  const int status = backward(model, a, ready, self);
  pg__leave(ctx, place);
  return status;
}

int pg_model_backward(const pg_model *model, pg_activations *a) {
  return pg_model_backward_ready(model, a, nobody, NULL);
}
