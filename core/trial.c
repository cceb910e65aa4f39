#include "trial.h"

#include "run_internal.h"

#include <stdlib.h>
#include <string.h>

struct pg_trial {
  pg_run *run;
  pg_parameter *parameter; /* the run's */
  const pg_optimizer *optimizer;
  double hypers[PG_MAX_HYPERS];
  int64_t updates;
  pg_tensor *increment;
  pg_tensor *slots[PG_MAX_SLOTS];
};

void pg_trial_free(pg_trial *trial) {
  if (!trial) return;
  for (size_t s = 0; s < PG_MAX_SLOTS; s++) pg_tensor_free(trial->slots[s]);
  pg_tensor_free(trial->increment);
  free(trial);
}

const pg_tensor *pg_trial_value(const pg_trial *trial) {
  return trial->increment;
}
const pg_optimizer *pg_trial_optimizer(const pg_trial *trial) {
  return trial->optimizer;
}
double *pg_trial_hypers(pg_trial *trial) {
  return trial->hypers;
}
int64_t pg_trial_updates(const pg_trial *trial) {
  return trial->updates;
}
const pg_tensor *pg_trial_slot(const pg_trial *trial, size_t slot) {
  return trial->slots[slot];
}

int pg_trial_resume(pg_trial *t, int64_t updates, const pg_tensor *increment,
                    const pg_tensor *const *slots) {
  int status = 0;
  if (increment) PG_TRY(pg_tensor_copy(t->increment, increment));
  for (size_t s = 0; s < t->optimizer->slot_count; s++)
    if (slots[s]) PG_TRY(pg_tensor_copy(t->slots[s], slots[s]));
  t->updates = updates;
fail:
  return status;
}

static int check(const pg_run *run, const pg_parameter *p, const pg_optimizer *o,
                 const double *hypers, bool inherit) {
  pg_context *ctx = run->context;
  const pg_optimizer *own =
      p->assignment < 0 ? NULL : run->assigned[p->assignment]->public.optimizer;
  if (!o->increment)
    return pg_fail(ctx, PG_EINVAL, "a trial of '%s': it makes no increments", o->name);
  if (!own || !own->increment)
    return pg_fail(ctx, PG_EINVAL, "a trial on %s: it is frozen and has no gradient", p->name);
  if (run->sharded)
    return pg_fail(ctx, PG_EINVAL, "a trial on %s: its optimizer is shared out over %d ranks",
                   p->name, pg_comm_world(run->comm));
  if (inherit && own != o)
    return pg_fail(ctx, PG_EINVAL, "a trial of '%s' cannot begin with the slots of '%s'", o->name,
                   own->name);
  const int status = pg__check_suits(ctx, o, p);
  return status < 0 ? status : pg_optimizer_check(ctx, o, hypers);
}

int pg_trial_new(pg_run *run, pg_parameter *p, const pg_optimizer *o,
                 const double hypers[PG_MAX_HYPERS], bool inherit, pg_trial **out) {
  pg_context *ctx = run->context;
  pg_trial *t = NULL;
  int status;
  *out = NULL;
  PG_TRY(check(run, p, o, hypers, inherit));
  if (!(t = calloc(1, sizeof *t))) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for a trial on %s", p->name);
    goto fail;
  }
  t->run = run;
  if (o->moments && !run->moment) {
    run->wants_moment = true;
    run->prepared = false; /* measured from the next gradients on */
  }
  t->parameter = p;
  t->optimizer = o;
  memcpy(t->hypers, hypers, sizeof t->hypers);
  t->updates = inherit ? p->updates : 0;
  PG_TRY(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){p->rows, p->columns}, &t->increment));
  for (size_t s = 0; s < o->slot_count; s++) {
    int64_t shape[2] = {0, 0};
    int ndim = pg_slot_dims(&o->slots[s], p->rows, p->columns, shape);
    PG_TRY(pg_tensor_new(ctx, o->slots[s].dtype, ndim, shape, &t->slots[s]));
    if (inherit) PG_TRY(pg_tensor_copy(t->slots[s], p->slots[s]));
  }
  *out = t;
  return 0;
fail:
  pg_trial_free(t);
  return status;
}

int pg_trial_increment(pg_trial *t, double scale) {
  const pg_parameter *p = t->parameter;
  const int lr = pg_optimizer_hyper_index(t->optimizer, "lr", NULL);
  void *slots[PG_MAX_SLOTS], *const *flat = slots;
  if (!p->gradient)
    return pg_fail(t->run->context, PG_ESTATE, "a trial on %s: it has no gradient", p->name);
  for (size_t s = 0; s < t->optimizer->slot_count; s++) slots[s] = t->slots[s]->data;
  const float *gradient = p->gradient->data;
  if (t->optimizer->moments && !t->run->moment)
    return pg_fail(t->run->context, PG_ESTATE,
                   "a trial of '%s': the head's inputs are measured from the next gradients on",
                   t->optimizer->name);
  const float *moment = t->run->moment ? t->run->moment->data : NULL;
  float *increment = t->increment->data, *value = p->value->data;
  const int64_t updates = t->updates + 1;
  const pg_increment_group group = {.context = t->run->context,
                                    .count = 1,
                                    .rows = p->rows,
                                    .columns = p->columns,
                                    .all_rows = p->rows,
                                    .comm = pg_comm_self(),
                                    .gradients = &gradient,
                                    .slots = &flat,
                                    .increments = &increment,
                                    .moments = &moment,
                                    .updates = &updates,
                                    .hypers = t->hypers,
                                    .lr = lr < 0 ? 0 : t->hypers[lr] * scale,
                                    .parameters = &t->parameter,
                                    .values = &value};
  int status = t->optimizer->increment(&group, t->optimizer->self);
  if (status == 0) t->updates++;
  return status;
}
