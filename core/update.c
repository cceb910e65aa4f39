/* One update (SPEC §3): gradients of the optimizer batch, norm and clip, increments, apply. */
#include "run_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A bucket of gradients is summed over the ranks as soon as the backward pass has made so many
 * elements: 32 MiB take a fast link about 0.1 ms, long against the 20 us that starting a sum costs,
 * and short against the rest of the backward pass, which hides it. A bucket ends with a parameter,
 * so a large head is one of its own. */
#define BUCKET_ELEMENTS ((int64_t)1 << 23)

/* pg_ready_fn: the gradients of the parameters from `index` on are complete on this rank. */
static int gradients_ready(void *self, size_t index) {
  pg_run *run = self;
  pg_context *ctx = run->context;
  int status = 0;
  while (run->next_ready > index) {
    const pg_parameter *p = pg_model_parameter(run->model, --run->next_ready);
    if (!p->gradient) continue;
    int64_t n = p->rows * p->columns;
    if (run->noise.wanted)
      PG_TRY(
          pg__noise_part(run, (float *)p->gradient->data - (const float *)run->gradients->data, n));
    /* Tells whose gradient was not finite, which the sum over the ranks no longer does. */
    pg__at(ctx, p->name, 0);
    PG_LAUNCH(ctx, sum, p->gradient->data, n, true, &run->local_sums[run->next_ready]);
    pg__at(ctx, NULL, 0);
    run->filled += pg__round_up(n, 64);
  }
  if (run->filled > run->reduced && (index == 0 || run->filled - run->reduced >= BUCKET_ELEMENTS)) {
    PG_TRY(pg_comm_sum(run->comm, ctx, (float *)run->gradients->data + run->reduced,
                       run->filled - run->reduced));
    run->reduced = run->filled;
  }
fail:
  return status;
}

/* The first rank with a gradient that is not finite and its first such parameter, in the model's
 * order, alike on all ranks; -1 when every rank's own gradients are finite. */
static int first_bad(pg_run *run, int *rank, size_t *parameter) {
  pg_context *ctx = run->context;
  const size_t count = pg_model_count(run->model);
  const double none = -(double)pg_comm_world(run->comm) * (double)count;
  double key = none, *sums = calloc(count, sizeof *sums);
  int status;
  *rank = -1;
  if (!sums) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for a report");
    goto fail;
  }
  PG_LAUNCH(ctx, download, sums, run->local_sums, count * sizeof *sums);
  for (size_t i = 0; i < count && key == none; i++)
    if (pg_model_parameter(run->model, i)->gradient && !isfinite(sums[i]))
      key = -((double)pg_comm_rank(run->comm) * (double)count + (double)i);
  PG_TRY(pg_comm_max_f64(run->comm, ctx, &key, 1));
  if (key > none) {
    *rank = (int)(-key / (double)count);
    *parameter = (size_t)(-key - (double)*rank * (double)count);
  }
  status = 0;
fail:
  free(sums);
  return status;
}

/* The text of a refusal: alike on all ranks, from numbers that are. Returns PG_ENONFINITE, or
 * another failure. */
static int refuse(pg_run *run, double loss) {
  pg_context *ctx = run->context;
  const size_t count = pg_model_count(run->model);
  const char *name = NULL;
  char where[32] = "";
  int status, rank = -1;
  size_t bad = 0, s = 0;
  double *sums = calloc(count, sizeof *sums);
  if (isnan(loss)) loss = (double)NAN; /* is printed without a sign */
  if (!sums) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for a report");
    goto fail;
  }
  if (run->local_sums) PG_TRY(first_bad(run, &rank, &bad));
  if (rank >= 0) {
    name = pg_model_parameter(run->model, bad)->name;
    snprintf(where, sizeof where, " on rank %d", rank);
  } else {
    PG_LAUNCH(ctx, download, sums, run->sums, count * sizeof *sums);
    for (size_t i = 0; i < count && !name; i++) {
      const pg_parameter *p = pg_model_parameter(run->model, i);
      if (p->gradient && !isfinite(sums[s++])) name = p->name;
    }
  }
  if (name)
    status = pg_fail(ctx, PG_ENONFINITE,
                     "update %lld refused: the gradient of %s is not finite%s (loss %g); nothing "
                     "was applied",
                     (long long)(run->updates + 1), name, where, loss);
  else
    status = pg_fail(ctx, PG_ENONFINITE, "update %lld refused: the loss is %g; nothing was applied",
                     (long long)(run->updates + 1), loss);
fail:
  free(sums);
  return status;
}

/* One over the number of tokens of an optimizer batch. */
static double per_token(const pg_run *run) {
  return 1.0 / ((double)run->sequences * (double)run->time);
}

/* Add this micro-batch to the second moment of the head's inputs. */
static int add_moment(pg_run *run, const void *hidden, bool first) {
  pg_context *ctx = run->context;
  const pg_dtype type = pg_model_compute(run->model);
  const int64_t d = pg_model_head(run->model)->columns;
  const pg_gemm product = {.transpose_a = true,
                           .m = d,
                           .n = d,
                           .k = run->micro * run->time,
                           .alpha = (float)per_token(run),
                           .beta = first ? 0 : 1,
                           .a = hidden,
                           .b = hidden,
                           .c = run->moment->data,
                           .lda = d,
                           .ldb = d,
                           .ldc = d,
                           .type_a = type,
                           .type_b = type,
                           .type_c = PG_F32};
  int status;
  PG_LAUNCH(ctx, gemm, &product);
fail:
  return status;
}

static double waited(const pg_run *run) {
  return run->loader ? pg_loader_wait_seconds(run->loader) : 0;
}

int pg__next_states(pg_run *run, const void **hidden) {
  pg_context *ctx = run->context;
  int status;
  if (run->hidden) return pg__model_given(run->model, run->activations, run->hidden, hidden);
  pg__begin(ctx, PG_PART_DATA_WAIT, "loader");
  status = pg_loader_next(run->loader, run->inputs, run->targets);
  pg__end(ctx);
  PG_TRY(status);
  PG_TRY(
      pg_model_forward(run->model, run->activations, run->inputs, run->micro, run->time, hidden));
fail:
  return status;
}

/* Accumulate the micro-batches' gradients. Losses stay on the device: while one micro-batch is
 * computed the host queues the next, whose tokens travel meanwhile. */
static int accumulate(pg_run *run) {
  pg_context *ctx = run->context;
  const int64_t rounds = run->rounds;
  const void *hidden;
  int status, span = pg__enter(ctx, PG__PART_BY_OPERATION, "gradients", -1);
  PG_LAUNCH(ctx, zero, run->gradients->data,
            (size_t)pg_tensor_elements(run->gradients) * sizeof(float));
  for (int64_t m = 0; m < rounds; m++) {
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "update %lld was cancelled; nothing was applied",
                       (long long)(run->updates + 1));
      goto fail;
    }
    if (run->noise.wanted) PG_TRY(pg__noise_before(run));
    PG_TRY(pg__next_states(run, &hidden));
    if (run->moment) PG_TRY(add_moment(run, hidden, m == 0));
    PG_TRY(pg__head_loss(run->model, run->activations, run->targets, per_token(run),
                         &run->report->losses[m]));
    if (run->local_sums && m + 1 == rounds) {
      run->next_ready = pg_model_count(run->model);
      run->reduced = run->filled = 0;
      PG_TRY(pg_model_backward_ready(run->model, run->activations, gradients_ready, run));
    } else {
      PG_TRY(pg_model_backward(run->model, run->activations));
      if (run->noise.wanted) PG_TRY(pg__noise_part(run, 0, pg_tensor_elements(run->gradients)));
    }
    if (run->noise.wanted) PG_TRY(pg__noise_sum(run, m));
  }
  if (run->moment)
    PG_TRY(pg_comm_sum(run->comm, ctx, run->moment->data, pg_tensor_elements(run->moment)));
  PG_TRY(pg_comm_finish(run->comm, ctx));
fail:
  pg__leave(ctx, span);
  return status;
}

/* The loss and the hash of the tokens over all ranks, in one exchange: halves of a hash are whole
 * numbers in fp64, and so are their sums. */
static int agree(pg_run *run, pg_step *out) {
  const uint64_t hash = run->loader ? pg_loader_batch_hash(run->loader) : 0;
  double numbers[3] = {0, (double)(hash & 0xffffffffu), (double)(hash >> 32)};
  int status;
  for (int64_t m = 0; m < run->rounds; m++) numbers[0] += run->told->losses[m];
  PG_TRY(pg_comm_sum_f64(run->comm, run->context, numbers, 3));
  out->loss = numbers[0] * per_token(run);
  out->batch_hash = (uint64_t)numbers[1] + ((uint64_t)numbers[2] << 32);
fail:
  return status;
}

/* Clip gradients one by one, for the assignments that ask for it. The host has what the report said
 * of all of them by now. */
static int clip_each(pg_run *run) {
  pg_context *ctx = run->context;
  int status = 0;
  for (int a = 0; a < run->assigned_count; a++) {
    const pg__assigned *assigned = run->assigned[a];
    for (size_t i = 0; i < assigned->count && assigned->public.max_norm < HUGE_VAL; i++) {
      const pg_parameter *p = assigned->parameters[i];
      if (!p->gradient) continue;
      pg__at(ctx, p->name, 0);
      PG_LAUNCH(ctx, sum, p->gradient->data, p->rows * p->columns, true, run->sums);
      PG_LAUNCH(ctx, clip_factor, run->sums, 1, assigned->public.max_norm, &run->report->clip);
      PG_LAUNCH(ctx, clip_apply, &run->report->clip, p->rows * p->columns, p->gradient->data);
    }
  }
fail:
  return status;
}

int pg_run_gradients(pg_run *run, pg_step *out) {
  pg_context *ctx = run->context;
  double start = pg__now(), wait = waited(run);
  int status, span = -1;
  memset(out, 0, sizeof *out);
  if (run->torn)
    return pg_fail(ctx, PG_ESTATE, "update %lld failed halfway; load a checkpoint to go on",
                   (long long)(run->updates + 1));
  ctx->update = run->updates + 1;
  if (run->loader) pg_loader_get_state(run->loader, &run->before);
  run->have_gradients = run->applied = run->noise.measured = false;
  PG_TRY(pg__run_prepare(run));
  PG_TRY(accumulate(run));

  int64_t count = 0;
  span = pg__enter(ctx, PG_PART_OPTIMIZER, "clip", -1);
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (!p->gradient) continue;
    pg__at(ctx, p->name, 0);
    PG_LAUNCH(ctx, sum, p->gradient->data, p->rows * p->columns, true, &run->sums[count]);
    count++;
  }
  pg__at(ctx, NULL, 0);
  PG_LAUNCH(ctx, clip_factor, run->sums, count, run->max_norm, &run->report->clip);
  /* The one wait of an update. A refused update leaves weights, slots and counts as they were, but
   * the first increment that is queued moves slots, which no kernel puts back, and an optimizer may
   * be Lua that acts on what it reads: the host has to know before. */
  PG_LAUNCH(ctx, download, run->told, run->report, run->report_bytes);
  PG_TRY(agree(run, out));
  if (!run->told->clip.finite || !isfinite(out->loss)) {
    status = refuse(run, out->loss);
    goto fail;
  }
  if (run->noise.wanted) PG_TRY(pg__noise_finish(run, run->told->clip.norm));
  PG_LAUNCH(ctx, clip_apply, &run->report->clip, pg_tensor_elements(run->gradients),
            run->gradients->data);
  PG_TRY(clip_each(run));
  pg__leave(ctx, span);

  run->last_loss = out->loss;
  run->last_factor = run->told->clip.factor;
  out->norm = run->told->clip.norm;
  out->factor = run->told->clip.factor;
  out->update = run->updates;
  out->tokens = run->tokens;
  out->wait_seconds = waited(run) - wait;
  out->seconds = pg__now() - start;
  run->have_gradients = true;
  ctx->update = 0;
  return 0;
fail:; /* A declaration may follow a label since C23 only. */
  /* A failed update must leave the data position where a retry or a checkpoint expects it. The
   * text of the failure that brought us here is the one to report. A refusal is the same on all
   * ranks; anything else happened here alone. */
  char message[sizeof ctx->message];
  pg__leave(ctx, span);
  ctx->update = 0;
  memcpy(message, ctx->message, sizeof message);
  if (status != PG_ENONFINITE) pg_comm_fail(run->comm, message);
  if (run->loader) pg_loader_set_state(run->loader, &run->before);
  memcpy(ctx->message, message, sizeof message);
  return status;
}

/* A hyperparameter, 0 when the optimizer has none of that name. */
static double hyper_of(const pg_assignment *a, const char *name) {
  const int index = pg_optimizer_hyper_index(a->optimizer, name, NULL);
  return index < 0 ? 0 : a->hypers[index];
}
static double lr_of(const pg_assignment *a) {
  return hyper_of(a, "lr") * a->scale;
}
/* What the weights are multiplied by. */
static double keep_of(const pg_assignment *a) {
  return 1 - hyper_of(a, "weight_decay") * (a->independent_decay ? a->scale : lr_of(a));
}

/* Increments of `count` like-shaped parameters, or of this rank's rows of them, and their
 * application. */
static int update_chunk(pg_run *run, const pg_assignment *a, pg_parameter **parameters,
                        size_t count) {
  pg_context *ctx = run->context;
  const pg_optimizer *o = a->optimizer;
  const float **gradients = calloc(count, sizeof *gradients);
  const float **moments = calloc(count, sizeof *moments);
  float **increments = calloc(count, sizeof *increments), **values = calloc(count, sizeof *values);
  uint16_t **copies = calloc(count, sizeof *copies);
  int64_t *updates = calloc(count, sizeof *updates);
  void **flat = calloc(count * (o->slot_count + 1), sizeof *flat);
  void *const **slots = calloc(count, sizeof *slots);
  int64_t used = 0, first, rows = pg__part(run, parameters[0], pg_comm_rank(run->comm), &first);
  const int64_t columns = parameters[0]->columns, at = first * columns;
  int status;
  if (!gradients || !moments || !increments || !values || !copies || !updates || !flat || !slots) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an update");
    goto fail;
  }
  for (size_t i = 0; i < count; i++) {
    pg_parameter *p = parameters[i];
    gradients[i] = (const float *)p->gradient->data + at;
    moments[i] = run->moment ? run->moment->data : NULL;
    values[i] = (float *)p->value->data + at;
    copies[i] = p->copy ? (uint16_t *)p->copy->data + at : NULL;
    updates[i] = p->updates + 1;
    slots[i] = &flat[i * o->slot_count];
    for (size_t s = 0; s < o->slot_count; s++) flat[i * o->slot_count + s] = p->slots[s]->data;
    if (p->increment) {
      increments[i] = (float *)p->increment->data + at;
    } else if (!o->applies) {
      increments[i] = (float *)run->scratch->data + used;
      used += pg__round_up(rows * columns, 64);
    }
  }

  pg_increment_group group = {.context = ctx,
                              .count = count,
                              .rows = rows,
                              .columns = columns,
                              .all_rows = parameters[0]->rows,
                              .first_row = first,
                              .comm = run->comm,
                              .gradients = gradients,
                              .slots = slots,
                              .increments = increments,
                              .moments = moments,
                              .updates = updates,
                              .hypers = a->hypers,
                              .lr = lr_of(a),
                              .parameters = parameters,
                              .values = values,
                              .apply = o->applies,
                              .cautious = a->cautious,
                              .keep = keep_of(a),
                              .copies = copies};
  pg__at(ctx, parameters[0]->name, count - 1);
  PG_TRY(o->increment(&group, o->self));
  for (size_t i = 0; i < count && !o->applies; i++) {
    pg__at(ctx, parameters[i]->name, 0);
    const pg_target to = {
        .value = values[i], .copy = copies[i], .keep = group.keep, .cautious = group.cautious};
    PG_LAUNCH(ctx, apply, 1, PG_F32, increments[i], rows * columns, 1, &to);
  }
  status = 0;
fail:
  free(gradients);
  free(moments);
  free(increments);
  free(values);
  free(copies);
  free(updates);
  free(flat);
  free(slots);
  return status;
}

/* Split those of an assignment's parameters that this rank updates into runs of one shape whose
 * unkept increments, where the optimizer needs them, fit the scratch buffer: the larger a group,
 * the more a batched optimizer can do at once. */
static int update_assignment(pg_run *run, pg__assigned *a) {
  pg_parameter **order = NULL;
  int status = 0, span = -1;
  size_t count = 0;
  const int rank = pg_comm_rank(run->comm);
  int64_t first_row;
  if (!a->count || !a->public.optimizer->increment) return 0;
  span = pg__enter(run->context, PG_PART_OPTIMIZER, a->public.optimizer->name, -1);
  PG_TRY(pg_optimizer_check(run->context, a->public.optimizer, a->public.hypers));
  if (!(order = malloc(a->count * sizeof *order))) {
    status = pg_fail(run->context, PG_ENOMEM, "out of memory for an update");
    goto fail;
  }
  /* Stable grouping by shape, shapes in order of first appearance. */
  for (size_t i = 0; i < a->count; i++) {
    const pg_parameter *first = a->parameters[i];
    bool seen = false;
    for (size_t j = 0; j < i && !seen; j++)
      seen = a->parameters[j]->rows == first->rows && a->parameters[j]->columns == first->columns;
    for (size_t j = i; j < a->count && !seen; j++)
      if (a->parameters[j]->rows == first->rows && a->parameters[j]->columns == first->columns &&
          pg__part(run, a->parameters[j], rank, &first_row) > 0)
        order[count++] = a->parameters[j];
  }
  int64_t room = run->scratch ? pg_tensor_elements(run->scratch) : 0;
  for (size_t from = 0, to; from < count; from = to) {
    int64_t used = 0;
    for (to = from; to < count; to++) {
      if (order[to]->rows != order[from]->rows || order[to]->columns != order[from]->columns) break;
      int64_t rows = pg__part(run, order[to], rank, &first_row);
      bool scratch = !a->public.optimizer->applies && !order[to]->increment;
      int64_t size = scratch ? pg__round_up(rows * order[to]->columns, 64) : 0;
      if (used + size > room) break;
      used += size;
    }
    PG_TRY(update_chunk(run, &a->public, order + from, to - from));
  }
  for (size_t i = 0; i < a->count; i++) a->parameters[i]->updates++;
fail:
  pg__leave(run->context, span);
  free(order);
  return status;
}

int pg_run_apply(pg_run *run, pg_step *out) {
  double start = pg__now();
  int status;
  if (!run->have_gradients)
    return pg_fail(run->context, PG_ESTATE,
                   "pg_run_apply without gradients: call "
                   "pg_run_gradients first");
  run->have_gradients = false;
  run->torn = true; /* until every weight is updated */
  run->context->update = run->updates + 1;
  for (int i = 0; i < run->assigned_count; i++) {
    pg__assigned *a = run->assigned[i];
    PG_TRY(update_assignment(run, a));
    const bool odd = a->public.cautious || a->public.max_norm < HUGE_VAL;
    a->keep = odd ? (double)NAN : keep_of(&a->public);
    a->kept_at = run->updates + 1;
  }
  PG_TRY(pg__exchange(run));
  run->torn = false;
  run->context->update = 0;
  run->applied = true;
  run->updates++;
  run->tokens += run->sequences * run->time;
  out->update = run->updates;
  out->tokens = run->tokens;
  out->seconds += pg__now() - start;
  return 0;
fail:
  run->context->update = 0;
  pg_comm_fail(run->comm, pg_context_message(run->context));
  return status;
}

int pg_run_rewind(pg_run *run, const pg_loader_state *position) {
  run->have_gradients = run->applied = false;
  return run->loader ? pg_loader_set_state(run->loader, position) : 0;
}

int pg_run_step(pg_run *run, pg_step *out) {
  int status;
  PG_TRY(pg_run_gradients(run, out));
  PG_TRY(pg_run_apply(run, out));
  return 0;
fail:
  return status;
}
