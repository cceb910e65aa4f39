/* What a run will need, from descriptions alone: nothing is allocated on the device. */
#include "model_internal.h"
#include "run_internal.h"

#include <stdlib.h>
#include <string.h>

/* Saturates: INT64_MAX stands for "too much to count". */
static int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* As pg_run_assign, without slots. */
static int assign(pg_run *run, const pg_run_entry *entry) {
  pg_context *ctx = run->context;
  pg__assigned *a = calloc(1, sizeof *a);
  pg__assigned **list =
      realloc(run->assigned, (size_t)(run->assigned_count + 1) * sizeof *run->assigned);
  int status;
  if (list) run->assigned = list;
  if (a) a->parameters = calloc(entry->count + 1, sizeof *a->parameters);
  if (!a || !list || !a->parameters) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an estimate");
    goto fail;
  }
  for (size_t i = 0; i < entry->count; i++) {
    pg_parameter *p = pg_model_parameter(run->model, entry->parameters[i]);
    bool taken = p && p->assignment >= 0;
    for (size_t j = 0; j < i; j++) taken = taken || a->parameters[j] == p;
    if (!p || taken) {
      status = pg_fail(ctx, PG_EINVAL, "parameter %zu%s%s", entry->parameters[i],
                       p ? " has two optimizers: " : " does not exist", p ? p->name : "");
      goto fail;
    }
    PG_TRY(pg__check_suits(ctx, entry->optimizer, p));
    a->parameters[a->count++] = p;
  }
  PG_TRY(pg__share_out(run, entry->optimizer, a->parameters, a->count));
  a->public.optimizer = entry->optimizer;
  if (entry->hypers)
    memcpy(a->public.hypers, entry->hypers, sizeof a->public.hypers);
  else
    pg_optimizer_defaults(entry->optimizer, a->public.hypers);
  for (size_t i = 0; i < a->count; i++) a->parameters[i]->assignment = run->assigned_count;
  run->assigned[run->assigned_count++] = a;
  return 0;
fail:
  if (a) free(a->parameters);
  free(a);
  return status;
}

/* Of the calls of increment that an assignment leads to, what the dearest takes for itself. */
static int64_t temporaries(const pg_run *run, const pg__assigned *a) {
  const pg_optimizer *o = a->public.optimizer;
  const int rank = pg_comm_rank(run->comm);
  int64_t most = 0, first;
  for (size_t i = 0; o->scratch && i < a->count; i++) {
    const pg_parameter *p = a->parameters[i];
    float kept, *increment = &kept; /* NULL where one of the group is not kept */
    pg_increment_group group = {.context = run->context,
                                .rows = pg__part(run, p, rank, &first),
                                .columns = p->columns,
                                .all_rows = p->rows,
                                .comm = run->comm,
                                .increments = &increment,
                                .hypers = a->public.hypers};
    if (group.rows == 0) continue;
    for (size_t j = i; j < a->count; j++) {
      const pg_parameter *like = a->parameters[j];
      if (like->rows != p->rows || like->columns != p->columns ||
          pg__part(run, like, rank, &first) == 0)
        continue;
      group.count++;
      if (like->role != PG_HEAD && !run->keep_all_increments) increment = NULL;
    }
    most = pg__max(most, o->scratch(&group));
  }
  return most;
}

/* The largest slot, which a checkpoint collects from the ranks. */
static int64_t gathered(const pg_run *run) {
  int64_t most = 0;
  for (size_t i = 0; run->sharded && i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    const pg_optimizer *o = run->assigned[p->assignment]->public.optimizer;
    for (size_t s = 0; s < o->slot_count; s++) {
      int64_t shape[2];
      pg_slot_dims(&o->slots[s], p->rows, p->columns, shape);
      most = pg__max(most, shape[0] * shape[1] * (int64_t)pg_dtype_size(o->slots[s].dtype));
    }
  }
  return most;
}

int pg_run_estimate(pg_context *ctx, const pg_model_config *config, pg_dtype compute,
                    const pg_run_options *options, const pg_run_entry *entries, size_t count,
                    bool diameter, pg_run_memory *out) {
  pg_model *model = NULL;
  pg_run *run = NULL;
  pg_run_memory need = {0};
  pg__run_elements sizes;
  int64_t everywhere, most = sizeof(double); /* a checkpoint sums up the weights */
  int status;
  PG_TRY(pg_model_describe(ctx, config, &model));
  PG_TRY(pg__run_describe(model, options, &run));
  for (size_t i = 0; i < count; i++) PG_TRY(assign(run, &entries[i]));
  PG_TRY(pg_run_check(run));

  const pg_model_config *c = &model->config;
  const int64_t parameters = (int64_t)pg_model_count(model);
  need.weights = pg__model_elements(model) * (int64_t)sizeof(float);
  need.copies = compute == PG_F32 ? 0 : need.weights / 2;
  pg__run_sizes(run, &sizes);
  need.gradients = sizes.gradients * (int64_t)sizeof(float);
  need.increments = sizes.increments * (int64_t)sizeof(float);
  pg_run_slot_bytes(run, &need.slots, &everywhere);
  need.activations = pg_activations_bytes(c, compute, run->micro, run->time, run->keep);
  need.logits = pg__logits_bytes(c, compute, run->micro * run->time);

  pg_workload work = {.type = compute,
                      .batch = run->micro,
                      .time = run->time,
                      .heads = c->heads,
                      .head_dim = c->head_dim,
                      .rows = pg_model_classes(c),
                      .columns = pg__max(c->width, pg__max(c->mlp, c->heads * c->head_dim))};
  PG_LAUNCH(ctx, workspace, &work, &need.workspace);
  /* Optimizers, the diameter and checkpoints take turns. */
  for (int a = 0; a < run->assigned_count; a++)
    most = pg__max(most, temporaries(run, run->assigned[a]));
  most = pg__max(most, gathered(run));
  if (diameter) {
    int64_t with;
    work.cloud_columns = c->width;
    PG_LAUNCH(ctx, workspace, &work, &with);
    /* The increment of a head A B is a product of a host's, made of two. */
    if (c->head.rank)
      with += (2 * pg_model_classes(c) + c->head.rank) * c->width * (int64_t)sizeof(float);
    most = pg__max(most, with - need.workspace);
  }
  need.scratch = (sizes.scratch + sizes.moment) * (int64_t)sizeof(float) + most +
                 (int64_t)run->report_bytes +
                 parameters * (int64_t)sizeof(double) * (pg_comm_world(run->comm) > 1 ? 2 : 1);

  const int64_t parts[] = {need.weights,    need.copies,      need.gradients, need.slots,
                           need.increments, need.activations, need.scratch,   need.workspace};
  for (size_t i = 0; i < PG_COUNT(parts); i++) need.total = plus(need.total, parts[i]);
  *out = need;
fail:
  pg_run_free(run);
  pg_model_free(model);
  return status;
}
