/* Hilbert RMS of a head increment over a panel (SPEC §4): how far, in Hilbert's distance, the
 * increment alone moves the distribution at each position. */
#include "finite.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int check(const pg_model *model, const pg_tensor *m) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *c = pg_model_get_config(model);
  const int64_t classes = pg_model_classes(c);
  if (m->dtype != PG_F32 || m->ndim != 2 || m->shape[0] != classes || m->shape[1] != c->width)
    return pg_fail(ctx, PG_EINVAL,
                   "the Hilbert range needs an F32 matrix [%lld, %lld] like the head, not %s of %d "
                   "dimensions [%lld, %lld]",
                   (long long)classes, (long long)c->width, pg_dtype_name(m->dtype), m->ndim,
                   (long long)(m->ndim > 0 ? m->shape[0] : 1),
                   (long long)(m->ndim > 1 ? m->shape[1] : 1));
  return pg__check_finite(m, "the Hilbert range's matrix");
}

int pg_hilbert(const pg_model *model, pg_activations *a, const pg_panel *panel,
               const pg_tensor *matrix, double *rms, float *ranges) {
  return pg_hilbert_shared(model, a, panel, matrix, pg_comm_self(), rms, ranges);
}

/* The range of a position comes from one rank, and 0 is added to it: the same bits as alone. */
static int add_ranges(pg_comm *comm, pg_context *ctx, float *ranges, int64_t count) {
  double *wide = NULL;
  int status = 0;
  if (pg_comm_world(comm) == 1) return 0;
  if (!(wide = malloc((size_t)count * sizeof *wide))) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld Hilbert ranges", (long long)count);
    goto fail;
  }
  for (int64_t i = 0; i < count; i++) wide[i] = ranges[i];
  PG_TRY(pg_comm_meet(comm, ctx, "a Hilbert range", NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, wide, count));
  for (int64_t i = 0; i < count; i++) ranges[i] = (float)wide[i];
fail:
  free(wide);
  return status;
}

typedef struct ranges_job {
  const pg_model *model;
  pg_activations *a;
  const pg_tensor *matrix;
  float *all, *chunk; /* in panel order; of one batch */
} ranges_job;

static int ranges_batch(void *self, const int32_t *ids, const int32_t *targets,
                        const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  ranges_job *job = self;
  int status;
  (void)targets;
  PG_TRY(pg_model_forward(job->model, job->a, ids, sequences, length, NULL));
  PG_TRY(pg_head_ranges(job->model, job->a, job->matrix, 0, sequences * length, job->chunk));
  for (int64_t k = 0; k < sequences; k++)
    memcpy(job->all + pieces[k].first, job->chunk + k * length, (size_t)length * sizeof *job->all);
fail:
  return status;
}

int pg_hilbert_shared(const pg_model *model, pg_activations *a, const pg_panel *panel,
                      const pg_tensor *matrix, pg_comm *comm, double *rms, float *ranges) {
  pg_context *ctx = pg_model_context(model);
  ranges_job job = {model, a, matrix, NULL, NULL};
  pg__panel_visit visit = {
      .what = "the Hilbert range", .comm = comm, .batch = ranges_batch, .self = &job};
  int status = 0;

  PG_TRY(check(model, matrix));
  pg_activations_size(a, &visit.positions, &visit.time);
  job.all = calloc(2 * (size_t)panel->tokens, sizeof *job.all);
  if (!job.all) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld Hilbert ranges", (long long)panel->tokens);
    goto fail;
  }
  job.chunk = job.all + panel->tokens;
  PG_TRY(pg__panel_pass(ctx, panel, &visit));
  PG_TRY(add_ranges(comm, ctx, job.all, panel->tokens));
  double sum = 0;
  for (int64_t i = 0; i < panel->tokens; i++) {
    const double x = job.all[i];
    if (!isfinite(x))
      PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                     "the Hilbert range of panel position %lld is %g: the "
                     "model's weights or the increment are too large or not finite",
                     (long long)i, x));
    sum += x * x;
  }
  *rms = sqrt(sum / (double)panel->tokens);
  if (ranges) memcpy(ranges, job.all, (size_t)panel->tokens * sizeof *ranges);
fail:
  if (status < 0 && status != PG_ENONFINITE) pg_comm_fail(comm, pg_context_message(ctx));
  free(job.all);
  return status;
}
