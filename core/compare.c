/* Two models on one panel: the losses of each, and how far apart their distributions are. */
#include "model_internal.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct losses_job {
  const pg_model *model;
  pg_activations *a;
  float *losses, *chunk;
} losses_job;

static int losses_batch(void *self, const int32_t *ids, const int32_t *targets,
                        const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  losses_job *job = self;
  double sum;
  int status;
  PG_TRY(pg_model_forward(job->model, job->a, ids, sequences, length, NULL));
  PG_TRY(pg_head_loss(job->model, job->a, targets, 0, &sum, job->chunk));
  for (int64_t k = 0; k < sequences; k++)
    memcpy(job->losses + pieces[k].first, job->chunk + k * length,
           (size_t)length * sizeof *job->chunk);
fail:
  return status;
}

int pg_panel_losses(const pg_model *model, pg_activations *a, const pg_panel *panel,
                    float *losses) {
  pg_context *ctx = pg_model_context(model);
  losses_job job = {model, a, losses, malloc((size_t)panel->tokens * sizeof(float))};
  pg__panel_visit visit = {.what = "the comparison", .batch = losses_batch, .self = &job};
  int status;
  if (!job.chunk)
    return pg_fail(ctx, PG_ENOMEM, "no memory for %lld losses", (long long)panel->tokens);
  pg_activations_size(a, &visit.positions, &visit.time);
  status = pg__panel_pass(ctx, panel, &visit);
  free(job.chunk);
  return status;
}

typedef struct between_job {
  const pg_model *from, *to;
  pg_activations *a, *b;
  float *ranges, *chunk;
} between_job;

static int between_batch(void *self, const int32_t *ids, const int32_t *targets,
                         const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  between_job *job = self;
  int status;
  (void)targets;
  PG_TRY(pg_model_forward(job->from, job->a, ids, sequences, length, NULL));
  PG_TRY(pg_model_forward(job->to, job->b, ids, sequences, length, NULL));
  PG_TRY(pg__head_between(job->from, job->a, job->to, job->b, sequences * length, job->chunk));
  for (int64_t k = 0; k < sequences; k++)
    memcpy(job->ranges + pieces[k].first, job->chunk + k * length,
           (size_t)length * sizeof *job->chunk);
fail:
  return status;
}

int pg__check_comparable(const pg_model *from, const pg_model *to) {
  const pg_model_config *ours = pg_model_get_config(from), *theirs = pg_model_get_config(to);
  if (pg_model_context(from) != pg_model_context(to) || ours->vocab != theirs->vocab)
    return pg_fail(pg_model_context(to), PG_EINVAL,
                   "two models of one vocabulary and one context are compared; these have "
                   "vocabularies of %lld and %lld",
                   (long long)ours->vocab, (long long)theirs->vocab);
  if (ours->head.extra != theirs->head.extra)
    return pg_fail(pg_model_context(to), PG_EINVAL,
                   "two models of one softmax are compared; these have %lld and %lld extra classes",
                   (long long)ours->head.extra, (long long)theirs->head.extra);
  return 0;
}

int pg_hilbert_between(const pg_model *from, pg_activations *a, const pg_model *to,
                       pg_activations *b, const pg_panel *panel, double *rms, float *ranges) {
  pg_context *ctx = pg_model_context(to);
  between_job job = {from, to, a, b, ranges, NULL};
  pg__panel_visit visit = {.what = "the comparison", .batch = between_batch, .self = &job};
  int64_t positions, time;
  double sum = 0;
  int status = pg__check_comparable(from, to);
  if (status < 0) return status;
  if (a == b) return pg_fail(ctx, PG_EINVAL, "each of the two models needs its own activations");
  pg_activations_size(a, &visit.positions, &visit.time);
  pg_activations_size(b, &positions, &time);
  visit.positions = pg__min(visit.positions, positions);
  visit.time = pg__min(visit.time, time);
  job.chunk = malloc((size_t)panel->tokens * sizeof *job.chunk);
  if (!job.chunk)
    return pg_fail(ctx, PG_ENOMEM, "no memory for %lld distances", (long long)panel->tokens);
  status = pg__panel_pass(ctx, panel, &visit);
  free(job.chunk);
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
