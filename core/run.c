/* A run's parts and their lifetimes: loader, activations, assignments, gradients, increments. The
 * update itself is in update.c. */
#include "finite.h"
#include "run_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_slots(pg_parameter *p, size_t count) {
  if (p->slots) {
    for (size_t s = 0; s < count; s++) pg_tensor_free(p->slots[s]);
    free(p->slots);
  }
  p->slots = NULL;
}

static const pg_optimizer *optimizer_of(const pg_run *run, const pg_parameter *p) {
  return p->assignment < 0 ? NULL : run->assigned[p->assignment]->public.optimizer;
}

int pg__run_describe(pg_model *model, const pg_run_options *options, pg_run **out) {
  pg_context *ctx = pg_model_context(model);
  pg_run *run = NULL;
  int status;
  *out = NULL;
  pg_comm *comm = options->comm ? options->comm : pg_comm_self();
  int64_t micro = options->micro ? options->micro : options->sequences;
  int world = pg_comm_world(comm);
  if (options->sequences < 1 || micro < 1 || options->sequences / world < micro ||
      options->sequences % (micro * world) != 0)
    return pg_fail(ctx, PG_EINVAL,
                   "batch.sequences = %lld must be a multiple of micro x ranks = %lld x %d",
                   (long long)options->sequences, (long long)micro, world);
  if (!(options->max_norm > 0))
    return pg_fail(ctx, PG_EINVAL, "clip = %g must be positive (infinity only measures the norm)",
                   options->max_norm);

  if (!(run = calloc(1, sizeof *run))) goto oom;
  run->context = ctx;
  run->model = model;
  run->comm = comm;
  run->sequences = options->sequences;
  run->micro = micro;
  run->time = pg_model_get_config(model)->context;
  run->keep = options->recompute ? PG_KEEP_INPUTS : PG_KEEP_ALL;
  run->rounds = run->sequences / (micro * world);
  run->report_bytes = sizeof *run->report + (size_t)run->rounds * sizeof(double);
  run->max_norm = options->max_norm;
  run->keep_all_increments = options->keep_all_increments;
  run->sharded = options->shard_optimizer && world > 1;
  run->owners = calloc(pg_model_count(model), sizeof *run->owners);
  run->loads = calloc((size_t)world, sizeof *run->loads);
  if (!run->owners || !run->loads) goto oom;
  for (size_t i = 0; i < pg_model_count(model); i++) pg_model_parameter(model, i)->assignment = -1;
  *out = run;
  return 0;
oom:
  status = pg_fail(ctx, PG_ENOMEM, "out of memory for a run");
  pg_run_free(run);
  return status;
}

static int open_data(pg_context *ctx, const pg_model_config *config, const pg_run_options *options,
                     pg_loader **out) {
  const pg_comm *comm = options->comm ? options->comm : pg_comm_self();
  const pg_loader_options data = {.folder = options->data,
                                  .pattern = options->train ? options->train : "*_train_*.bin",
                                  .time = config->context,
                                  .batch = options->sequences,
                                  .micro = options->micro ? options->micro : options->sequences,
                                  .rank = pg_comm_rank(comm),
                                  .world = pg_comm_world(comm),
                                  .vocab = config->vocab,
                                  .seed = options->data_seed,
                                  .shuffle = true,
                                  .depth = options->read_ahead};
  return pg_loader_open(ctx, &data, out);
}

int pg_run_data(pg_context *ctx, const pg_model_config *config, const pg_run_options *options,
                int64_t *updates) {
  pg_loader *loader;
  int status = open_data(ctx, config, options, &loader);
  if (status < 0) return status;
  *updates = pg_loader_batches(loader);
  pg_loader_close(loader);
  return 0;
}

/* Hidden states instead of data. */
static int take_states(pg_run *run, const pg_run_options *options) {
  pg_context *ctx = run->context;
  const pg_model_config *c = pg_model_get_config(run->model);
  const pg_tensor *h = options->hidden;
  int status;
  if (c->layers != 0 || c->context != 1 || pg_comm_world(run->comm) > 1 || run->rounds != 1)
    return pg_fail(ctx, PG_EINVAL,
                   "given hidden states need a model of 0 layers and context 1, one rank and one "
                   "micro-batch; these are %lld, %lld, %d and %lld",
                   (long long)c->layers, (long long)c->context, pg_comm_world(run->comm),
                   (long long)run->rounds);
  if (h->context != ctx || h->dtype != PG_F32 || h->ndim != 2 || h->shape[0] != run->sequences ||
      h->shape[1] != c->width || !pg_tensor_contiguous(h))
    return pg_fail(ctx, PG_EINVAL,
                   "hidden states must be F32 [%lld, %lld] and contiguous, not %s of %d dimensions "
                   "[%lld, %lld]",
                   (long long)run->sequences, (long long)c->width, pg_dtype_name(h->dtype), h->ndim,
                   (long long)(h->ndim > 0 ? h->shape[0] : 1),
                   (long long)(h->ndim > 1 ? h->shape[1] : 1));
  PG_TRY(pg__check_finite(h, "hidden states"));
  PG_TRY(pg__check_ids(ctx, options->targets, run->sequences, c->vocab, "target"));
  PG_TRY(pg_tensor_view(h, 0, 2, h->shape, h->stride, &run->hidden));
fail:
  return status;
}

int pg_run_new(pg_model *model, const pg_run_options *options, pg_run **out) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *config = pg_model_get_config(model);
  pg_run *run = NULL;
  int status;
  *out = NULL;
  PG_TRY(pg__run_describe(model, options, &run));
  if (options->hidden)
    PG_TRY(take_states(run, options));
  else
    PG_TRY(open_data(ctx, config, options, &run->loader));
  PG_TRY(pg_activations_new(ctx, config, pg_model_compute(model), run->micro, run->time, run->keep,
                            &run->activations));
  PG_TRY(pg__alloc(ctx, run->report_bytes, "losses and clip factor", (void **)&run->report));
  size_t bytes = (size_t)(run->micro * run->time) * sizeof(int32_t);
  run->inputs = malloc(bytes);
  run->targets = malloc(bytes);
  run->told = malloc(run->report_bytes);
  if (!run->inputs || !run->targets || !run->told) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for a run");
    goto fail;
  }
  if (options->hidden) memcpy(run->targets, options->targets, bytes);
  *out = run;
  return 0;
fail:
  pg_run_free(run);
  return status;
}

static void drop_gradients(pg_run *run) {
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    pg_tensor_free(p->gradient);
    p->gradient = NULL;
  }
  pg__noise_free(run);
  pg_tensor_free(run->gradients);
  pg_tensor_free(run->scratch);
  pg_tensor_free(run->moment);
  run->gradients = run->scratch = run->moment = NULL;
  pg__release(run->context, run->sums, run->sums_bytes);
  pg__release(run->context, run->local_sums, run->sums_bytes);
  run->sums = run->local_sums = NULL;
  run->sums_bytes = 0;
  run->prepared = false;
  run->have_gradients = false;
}

void pg_run_free(pg_run *run) {
  if (!run) return;
  drop_gradients(run);
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    const pg_optimizer *o = optimizer_of(run, p);
    free_slots(p, o ? o->slot_count : 0);
    pg_tensor_free(p->increment);
    p->increment = NULL;
    p->assignment = -1;
    p->updates = 0;
  }
  for (int a = 0; a < run->assigned_count; a++) {
    free(run->assigned[a]->parameters);
    free(run->assigned[a]);
  }
  free(run->assigned);
  free(run->owners);
  free(run->loads);
  pg_loader_close(run->loader);
  pg_tensor_free(run->hidden);
  pg_activations_free(run->activations);
  pg__release(run->context, run->report, run->report_bytes);
  free(run->told);
  free(run->inputs);
  free(run->targets);
  free(run);
}

pg_model *pg_run_model(const pg_run *run) {
  return run->model;
}
pg_comm *pg_run_comm(const pg_run *run) {
  return run->comm;
}
bool pg_run_sharded(const pg_run *run) {
  return run->sharded;
}
pg_loader *pg_run_loader(const pg_run *run) {
  return run->loader;
}
pg_activations *pg_run_activations(const pg_run *run) {
  return run->activations;
}
int64_t pg_run_updates(const pg_run *run) {
  return run->updates;
}
int64_t pg_run_tokens(const pg_run *run) {
  return run->tokens;
}

void pg_run_set_progress(pg_run *run, int64_t updates, int64_t tokens) {
  run->updates = updates;
  run->tokens = tokens;
}

pg_assignment *pg_run_assignment(pg_run *run, int index) {
  if (index < 0 || index >= run->assigned_count) return NULL;
  return &run->assigned[index]->public;
}

/* Slots of zeros for this rank's part of one parameter. */
static int new_slots(const pg_run *run, const pg_optimizer *o, const pg_parameter *p,
                     pg_tensor ***out) {
  pg_context *ctx = run->context;
  int status;
  *out = NULL;
  if (!o->slot_count) return 0;
  pg_tensor **slots = calloc(o->slot_count, sizeof *slots);
  if (!slots) return pg_fail(ctx, PG_ENOMEM, "out of memory for the slots of %s", p->name);
  for (size_t s = 0; s < o->slot_count; s++) {
    int64_t shape[2];
    int ndim = pg__slot_part(run, p, &o->slots[s], shape);
    PG_TRY(pg_tensor_new(ctx, o->slots[s].dtype, ndim, shape, &slots[s]));
  }
  *out = slots;
  return 0;
fail:
  for (size_t s = 0; s < o->slot_count; s++) pg_tensor_free(slots[s]);
  free(slots);
  return status;
}

static void remove_from_assignment(pg_run *run, pg_parameter *p) {
  if (p->assignment < 0) return;
  pg__assigned *a = run->assigned[p->assignment];
  for (size_t i = 0; i < a->count; i++)
    if (a->parameters[i] == p) {
      memmove(&a->parameters[i], &a->parameters[i + 1], (a->count - i - 1) * sizeof *a->parameters);
      a->count--;
      return;
    }
}

int pg__check_suits(pg_context *ctx, const pg_optimizer *o, const pg_parameter *p) {
  if (o->most_rows && p->rows > o->most_rows)
    return pg_fail(ctx, PG_EINVAL, "%s takes at most %lld rows, and %s has %lld", o->name,
                   (long long)o->most_rows, p->name, (long long)p->rows);
  if (!o->moments || !strcmp(p->name, "lm_head.weight")) return 0;
  return pg_fail(ctx, PG_EINVAL,
                 "%s is for the head alone, not for %s: only its inputs are measured", o->name,
                 p->name);
}

int pg_run_assign(pg_run *run, const pg_optimizer *optimizer, const double hypers[PG_MAX_HYPERS],
                  bool independent_decay, pg_parameter *const *parameters, size_t count,
                  int *assignment) {
  pg_context *ctx = run->context;
  pg__assigned *a = NULL;
  pg_tensor ***slots = NULL;
  char *owners = NULL; /* owners and loads as they were */
  const size_t owners_bytes = pg_model_count(run->model) * sizeof *run->owners;
  const size_t loads_bytes = (size_t)pg_comm_world(run->comm) * sizeof *run->loads;
  int status;
  PG_TRY(pg_optimizer_check(ctx, optimizer, hypers));
  for (size_t i = 0; i < count; i++) PG_TRY(pg__check_suits(ctx, optimizer, parameters[i]));

  a = calloc(1, sizeof *a);
  slots = calloc(count ? count : 1, sizeof *slots);
  pg__assigned **list =
      realloc(run->assigned, (size_t)(run->assigned_count + 1) * sizeof *run->assigned);
  if (list) run->assigned = list;
  if (a) a->parameters = calloc(count ? count : 1, sizeof *a->parameters);
  if (!a || !slots || !list || !a->parameters) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an assignment");
    goto fail;
  }
  /* Everything that can fail comes before anything changes hands. */
  owners = malloc(owners_bytes + loads_bytes);
  if (!owners) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an assignment");
    goto fail;
  }
  memcpy(owners, run->owners, owners_bytes);
  memcpy(owners + owners_bytes, run->loads, loads_bytes);
  PG_TRY(pg__share_out(run, optimizer, parameters, count));
  for (size_t i = 0; i < count; i++)
    if (optimizer_of(run, parameters[i]) != optimizer)
      PG_TRY(new_slots(run, optimizer, parameters[i], &slots[i]));

  a->public.optimizer = optimizer;
  memcpy(a->public.hypers, hypers, sizeof a->public.hypers);
  a->public.scale = 1;
  a->public.independent_decay = independent_decay;
  a->public.max_norm = HUGE_VAL;
  for (size_t i = 0; i < count; i++) {
    pg_parameter *p = parameters[i];
    const pg_optimizer *old = optimizer_of(run, p);
    if (old != optimizer) {
      free_slots(p, old ? old->slot_count : 0);
      p->slots = slots[i];
      p->updates = 0;
    }
    remove_from_assignment(run, p);
    p->assignment = run->assigned_count;
    a->parameters[a->count++] = p;
  }
  run->assigned[run->assigned_count] = a;
  if (assignment) *assignment = run->assigned_count;
  run->assigned_count++;
  free(slots);
  free(owners);
  /* A parameter may have become frozen, or stopped being so. */
  run->prepared = false;
  run->have_gradients = false;
  return 0;
fail:
  for (size_t i = 0; slots && i < count; i++)
    if (slots[i]) {
      for (size_t s = 0; s < optimizer->slot_count; s++) pg_tensor_free(slots[i][s]);
      free(slots[i]);
    }
  if (owners) {
    memcpy(run->owners, owners, owners_bytes);
    memcpy(run->loads, owners + owners_bytes, loads_bytes);
  }
  free(owners);
  free(slots);
  if (a) free(a->parameters);
  free(a);
  return status;
}

int pg_run_check(pg_run *run) {
  char names[700] = "";
  size_t used = 0, missing = 0;
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (p->assignment >= 0) continue;
    missing++;
    if (used + strlen(p->name) + 8 < sizeof names) {
      used +=
          (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", p->name);
    } else if (names[used - 1] != '.') {
      used += (size_t)snprintf(names + used, sizeof names - used, ", ...");
    }
  }
  if (!missing) return 0;
  return pg_fail(run->context, PG_EINVAL, "no optimizer updates %zu of %zu parameters: %s", missing,
                 pg_model_count(run->model), names);
}

static bool frozen(const pg_run *run, const pg_parameter *p) {
  return !optimizer_of(run, p)->increment;
}
static bool kept(const pg_run *run, const pg_parameter *p) {
  return !frozen(run, p) && (p->role == PG_HEAD || run->keep_all_increments);
}

void pg__run_sizes(const pg_run *run, pg__run_elements *out) {
  *out = (pg__run_elements){0};
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    int64_t first, part = pg__part(run, p, pg_comm_rank(run->comm), &first);
    if (frozen(run, p)) continue;
    if (p->role == PG_HEAD && (run->wants_moment || optimizer_of(run, p)->moments))
      out->moment = p->columns * p->columns;
    out->gradients += pg__round_up(p->rows * p->columns, 64);
    if (kept(run, p))
      out->increments += p->rows * p->columns;
    else if (!optimizer_of(run, p)->applies)
      out->scratch = pg__max(out->scratch, pg__round_up(part * p->columns, 64));
  }
  if (out->scratch) /* room for one chunk of a group: see update.c */
    out->scratch =
        pg__max(out->scratch, pg__min(pg__round_up(PG__CHUNK_ELEMENTS, 64), out->gradients));
}

/* Backward reaches the head first, then the blocks from the last, then the embedding. The model
 * lists them the other way round, so buckets follow the reversed list. */
int pg__run_prepare(pg_run *run) {
  pg_context *ctx = run->context;
  size_t count = pg_model_count(run->model);
  pg__run_elements sizes;
  int status;
  if (run->prepared) return 0;
  PG_TRY(pg_run_check(run));
  drop_gradients(run);

  pg__run_sizes(run, &sizes);
  PG_TRY(pg_tensor_new(ctx, PG_F32, 1, &sizes.gradients, &run->gradients));
  int64_t offset = 0;
  for (size_t i = count; i-- > 0;) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    int64_t shape[2] = {p->rows, p->columns}, stride[2] = {p->columns, 1};
    if (!frozen(run, p)) {
      PG_TRY(pg_tensor_view(run->gradients, offset, 2, shape, stride, &p->gradient));
      offset += pg__round_up(p->rows * p->columns, 64);
    }
    if (kept(run, p)) {
      if (!p->increment) PG_TRY(pg_tensor_new(ctx, PG_F32, 2, shape, &p->increment));
    } else {
      pg_tensor_free(p->increment);
      p->increment = NULL;
    }
  }
  if (sizes.moment) {
    const int64_t d = pg_model_head(run->model)->columns;
    PG_TRY(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){d, d}, &run->moment));
  }
  if (sizes.scratch) PG_TRY(pg_tensor_new(ctx, PG_F32, 1, &sizes.scratch, &run->scratch));
  run->sums_bytes = (count ? count : 1) * sizeof(double);
  PG_TRY(pg__alloc(ctx, run->sums_bytes, "gradient norms", (void **)&run->sums));
  if (pg_comm_world(run->comm) > 1)
    PG_TRY(pg__alloc(ctx, run->sums_bytes, "gradient norms", (void **)&run->local_sums));
  run->prepared = true;
  return 0;
fail:
  drop_gradients(run);
  return status;
}
