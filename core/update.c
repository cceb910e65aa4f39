/* One update (SPEC §3): gradients of the optimizer batch, norm and clip, increments, apply. */
#include "run_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The first parameter, in the model's order, whose gradient is not finite. */
static int refuse(pg_run *run, const double *sums, double loss) {
  const char *name = NULL;
  size_t s = 0;
  for (size_t i = 0; i < pg_model_count(run->model) && !name; i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (p->gradient && !isfinite(sums[s++])) name = p->name;
  }
  if (name)
    return pg_fail(run->context, PG_ENONFINITE,
                   "update %lld refused: the gradient of %s is not finite (loss %g); nothing was "
                   "applied",
                   (long long)(run->updates + 1), name, loss);
  return pg_fail(run->context, PG_ENONFINITE,
                 "update %lld refused: the loss is %g; nothing was applied",
                 (long long)(run->updates + 1), loss);
}

/* Accumulate the micro-batches' gradients; *loss is the mean over the optimizer batch. */
static int accumulate(pg_run *run, double *loss) {
  pg_context *ctx = run->context;
  int64_t rounds = run->sequences / (run->micro * run->comm->world);
  double scale = 1.0 / ((double)run->sequences * (double)run->time), sum = 0;
  int status;
  PG_LAUNCH(ctx, zero, run->gradients->data,
            (size_t)pg_tensor_elements(run->gradients) * sizeof(float));
  for (int64_t m = 0; m < rounds; m++) {
    double part;
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "update %lld was cancelled; nothing was applied",
                       (long long)(run->updates + 1));
      goto fail;
    }
    PG_TRY(pg_loader_next(run->loader, run->inputs, run->targets));
    PG_TRY(
        pg_model_forward(run->model, run->activations, run->inputs, run->micro, run->time, NULL));
    PG_TRY(pg_head_loss(run->model, run->activations, run->targets, scale, &part, NULL));
    PG_TRY(pg_model_backward(run->model, run->activations));
    sum += part;
  }
  PG_TRY(run->comm->all_reduce_sum(run->comm, ctx, run->gradients->data,
                                   pg_tensor_elements(run->gradients)));
  PG_TRY(run->comm->all_reduce_sum_f64(run->comm, ctx, &sum, 1));
  *loss = sum * scale;
  return 0;
fail:
  return status;
}

int pg_run_gradients(pg_run *run, pg_step *out) {
  pg_context *ctx = run->context;
  double start = now(), wait = pg_loader_wait_seconds(run->loader), *sums = NULL;
  pg_clip clip;
  int status;
  memset(out, 0, sizeof *out);
  if (run->torn)
    return pg_fail(ctx, PG_ESTATE, "update %lld failed halfway; load a checkpoint to go on",
                   (long long)(run->updates + 1));
  pg_loader_get_state(run->loader, &run->before);
  run->have_gradients = false;
  PG_TRY(pg__run_prepare(run));
  PG_TRY(accumulate(run, &out->loss));

  int64_t count = 0;
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (p->gradient)
      PG_LAUNCH(ctx, sum, p->gradient->data, p->rows * p->columns, true, &run->sums[count++]);
  }
  PG_LAUNCH(ctx, clip_factor, run->sums, count, run->max_norm, run->clip);
  PG_LAUNCH(ctx, download, &clip, run->clip, sizeof clip);
  if (!clip.finite || !isfinite(out->loss)) {
    if (!(sums = malloc((size_t)(count + 1) * sizeof *sums))) {
      status = pg_fail(ctx, PG_ENOMEM, "out of memory for a report");
      goto fail;
    }
    PG_LAUNCH(ctx, download, sums, run->sums, (size_t)count * sizeof *sums);
    status = refuse(run, sums, out->loss);
    goto fail;
  }
  PG_LAUNCH(ctx, clip_apply, run->clip, pg_tensor_elements(run->gradients), run->gradients->data);

  out->norm = clip.norm;
  out->factor = clip.factor;
  out->update = run->updates;
  out->tokens = run->tokens;
  out->batch_hash = pg_loader_batch_hash(run->loader);
  PG_TRY(run->comm->all_reduce_sum_u64(run->comm, ctx, &out->batch_hash, 1));
  out->wait_seconds = pg_loader_wait_seconds(run->loader) - wait;
  out->seconds = now() - start;
  run->have_gradients = true;
  return 0;
fail:
  /* A failed update must leave the data position where a retry or a checkpoint expects it. The
   * text of the failure that brought us here is the one to report. */
  free(sums);
  char message[sizeof ctx->message];
  memcpy(message, ctx->message, sizeof message);
  pg_loader_set_state(run->loader, &run->before);
  memcpy(ctx->message, message, sizeof message);
  return status;
}

/* Increments of `count` like-shaped parameters, then their application. */
static int update_chunk(pg_run *run, const pg_assignment *a, pg_parameter **parameters,
                        size_t count) {
  pg_context *ctx = run->context;
  const pg_optimizer *o = a->optimizer;
  const float **gradients = calloc(count, sizeof *gradients);
  float **increments = calloc(count, sizeof *increments);
  int64_t *updates = calloc(count, sizeof *updates);
  void **flat = calloc(count * (o->slot_count + 1), sizeof *flat);
  void *const **slots = calloc(count, sizeof *slots);
  int64_t used = 0;
  int status;
  if (!gradients || !increments || !updates || !flat || !slots) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an update");
    goto fail;
  }
  for (size_t i = 0; i < count; i++) {
    pg_parameter *p = parameters[i];
    gradients[i] = p->gradient->data;
    updates[i] = p->updates + 1;
    slots[i] = &flat[i * o->slot_count];
    for (size_t s = 0; s < o->slot_count; s++) flat[i * o->slot_count + s] = p->slots[s]->data;
    if (p->increment) {
      increments[i] = p->increment->data;
    } else {
      increments[i] = (float *)run->scratch->data + used;
      used += pg__round_up(p->rows * p->columns, 64);
    }
  }

  int lr_index = pg_optimizer_hyper_index(o, "lr", NULL);
  int decay_index = pg_optimizer_hyper_index(o, "weight_decay", NULL);
  double lr = lr_index < 0 ? 0 : a->hypers[lr_index] * a->scale;
  double decay = decay_index < 0 ? 0 : a->hypers[decay_index];
  double keep = 1 - decay * (a->independent_decay ? a->scale : lr);
  pg_increment_group group = {.context = ctx,
                              .count = count,
                              .rows = parameters[0]->rows,
                              .columns = parameters[0]->columns,
                              .gradients = gradients,
                              .slots = slots,
                              .increments = increments,
                              .updates = updates,
                              .hypers = a->hypers,
                              .lr = lr,
                              .parameters = parameters};
  PG_TRY(o->increment(&group, o->self));
  for (size_t i = 0; i < count; i++) {
    pg_parameter *p = parameters[i];
    PG_LAUNCH(ctx, apply, keep, increments[i], p->rows * p->columns, p->value->data,
              p->copy ? p->copy->data : NULL);
    p->updates++;
  }
  status = 0;
fail:
  free(gradients);
  free(increments);
  free(updates);
  free(flat);
  free(slots);
  return status;
}

/* Split an assignment's parameters into runs of one shape whose unkept increments fit the scratch
 * buffer: the larger a group, the more a batched optimizer can do at once. */
static int update_assignment(pg_run *run, pg__assigned *a) {
  pg_parameter **order = NULL;
  int status = 0;
  size_t count = a->count;
  if (!count || !a->public.optimizer->increment) return 0;
  PG_TRY(pg_optimizer_check(run->context, a->public.optimizer, a->public.hypers));
  if (!(order = malloc(count * sizeof *order))) {
    status = pg_fail(run->context, PG_ENOMEM, "out of memory for an update");
    goto fail;
  }
  /* Stable grouping by shape, shapes in order of first appearance. */
  size_t placed = 0;
  for (size_t i = 0; i < count; i++) {
    const pg_parameter *first = a->parameters[i];
    bool seen = false;
    for (size_t j = 0; j < placed && !seen; j++) seen = order[j] == first;
    for (size_t j = i; j < count && !seen; j++)
      if (a->parameters[j]->rows == first->rows && a->parameters[j]->columns == first->columns)
        order[placed++] = a->parameters[j];
  }
  int64_t room = run->scratch ? pg_tensor_elements(run->scratch) : 0;
  for (size_t from = 0, to; from < count; from = to) {
    int64_t used = 0;
    for (to = from; to < count; to++) {
      if (order[to]->rows != order[from]->rows || order[to]->columns != order[from]->columns) break;
      int64_t size =
          order[to]->increment ? 0 : pg__round_up(order[to]->rows * order[to]->columns, 64);
      if (used + size > room) break;
      used += size;
    }
    PG_TRY(update_chunk(run, &a->public, order + from, to - from));
  }
fail:
  free(order);
  return status;
}

int pg_run_apply(pg_run *run, pg_step *out) {
  double start = now();
  int status;
  if (!run->have_gradients)
    return pg_fail(run->context, PG_ESTATE,
                   "pg_run_apply without gradients: call "
                   "pg_run_gradients first");
  run->have_gradients = false;
  run->torn = true; /* until every weight is updated */
  for (int a = 0; a < run->assigned_count; a++) PG_TRY(update_assignment(run, run->assigned[a]));
  run->torn = false;
  run->updates++;
  run->tokens += run->sequences * run->time;
  out->update = run->updates;
  out->tokens = run->tokens;
  out->seconds += now() - start;
  return 0;
fail:
  return status;
}

int pg_run_step(pg_run *run, pg_step *out) {
  int status;
  PG_TRY(pg_run_gradients(run, out));
  PG_TRY(pg_run_apply(run, out));
  return 0;
fail:
  return status;
}
