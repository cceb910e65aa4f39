/* Two models on one panel: the losses of each, and how far apart their distributions are. */
#include "model_internal.h"
#include "panel.h"

#include <math.h>

/* What a pass over the panel does with a batch of sequences of one length: `count` positions from
 * `first` of the panel's order. */
typedef struct pass {
  const pg_panel *panel;
  int64_t positions; /* that fit the activations at once */
  int64_t time;      /* longest sequence that fits */
  int (*batch)(void *self, int64_t first, int64_t sequences, int64_t length);
  void *self;
} pass;

/* Neighbours of one length share a batch: they lie one after another in the panel. */
static int run_pass(pg_context *ctx, const pass *p) {
  const pg_panel *panel = p->panel;
  for (size_t at = 0, next; at < panel->count; at = next) {
    const int64_t length = panel->pieces[at].length;
    int64_t n = 0;
    if (length > p->time)
      return pg_fail(ctx, PG_EINVAL,
                     "the panel has sequences of %lld positions, the model's context is %lld",
                     (long long)length, (long long)p->time);
    if (pg_context_cancelled(ctx))
      return pg_fail(ctx, PG_ECANCELED, "the comparison was cancelled");
    for (next = at; next < panel->count && panel->pieces[next].length == length &&
                    (n + 1) * length <= p->positions;
         next++)
      n++;
    int status = p->batch(p->self, panel->pieces[at].first, n, length);
    if (status < 0) return status;
  }
  return 0;
}

typedef struct losses_job {
  const pg_model *model;
  pg_activations *a;
  const pg_panel *panel;
  float *losses;
} losses_job;

static int losses_batch(void *self, int64_t first, int64_t sequences, int64_t length) {
  losses_job *job = self;
  double sum;
  int status =
      pg_model_forward(job->model, job->a, job->panel->ids + first, sequences, length, NULL);
  if (status < 0) return status;
  return pg_head_loss(job->model, job->a, job->panel->targets + first, 0, &sum,
                      job->losses + first);
}

int pg_panel_losses(const pg_model *model, pg_activations *a, const pg_panel *panel,
                    float *losses) {
  losses_job job = {model, a, panel, losses};
  pass p = {.panel = panel, .batch = losses_batch, .self = &job};
  pg_activations_size(a, &p.positions, &p.time);
  return run_pass(pg_model_context(model), &p);
}

typedef struct between_job {
  const pg_model *from, *to;
  pg_activations *a, *b;
  const pg_panel *panel;
  float *ranges;
} between_job;

static int between_batch(void *self, int64_t first, int64_t sequences, int64_t length) {
  between_job *job = self;
  const int32_t *ids = job->panel->ids + first;
  int status;
  PG_TRY(pg_model_forward(job->from, job->a, ids, sequences, length, NULL));
  PG_TRY(pg_model_forward(job->to, job->b, ids, sequences, length, NULL));
  PG_TRY(pg__head_between(job->from, job->a, job->to, job->b, sequences * length,
                          job->ranges + first));
fail:
  return status;
}

int pg_hilbert_between(const pg_model *from, pg_activations *a, const pg_model *to,
                       pg_activations *b, const pg_panel *panel, double *rms, float *ranges) {
  pg_context *ctx = pg_model_context(to);
  between_job job = {from, to, a, b, panel, ranges};
  pass p = {.panel = panel, .batch = between_batch, .self = &job};
  const int64_t ours = pg_model_get_config(from)->vocab, theirs = pg_model_get_config(to)->vocab;
  int64_t positions, time;
  double sum = 0;
  if (pg_model_context(from) != ctx || ours != theirs)
    return pg_fail(ctx, PG_EINVAL,
                   "two models of one vocabulary and one context are compared; these have "
                   "vocabularies of %lld and %lld",
                   (long long)ours, (long long)theirs);
  if (a == b) return pg_fail(ctx, PG_EINVAL, "each of the two models needs its own activations");
  pg_activations_size(a, &p.positions, &p.time);
  pg_activations_size(b, &positions, &time);
  p.positions = pg__min(p.positions, positions);
  p.time = pg__min(p.time, time);
  int status = run_pass(ctx, &p);
  if (status < 0) return status;
  for (int64_t i = 0; i < panel->tokens; i++) {
    if (!isfinite(ranges[i]))
      return pg_fail(ctx, PG_ENONFINITE, "the Hilbert distance at panel position %lld is %g",
                     (long long)i, (double)ranges[i]);
    sum += (double)ranges[i] * (double)ranges[i];
  }
  *rms = sqrt(sum / (double)panel->tokens);
  return 0;
}
