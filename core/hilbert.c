/* Hilbert RMS of a head increment over a panel (SPEC §4): how far, in Hilbert's distance, the
 * increment alone moves the distribution at each position. */
#include "finite.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Order pieces so that those of one length are neighbours and can share a forward pass; the
 * panel's own order breaks ties. */
static int by_length(const void *a, const void *b) {
  const pg_panel_piece *p = a, *q = b;
  if (p->length != q->length) return p->length > q->length ? -1 : 1;
  return (p->first > q->first) - (p->first < q->first);
}

static int check(const pg_model *model, const pg_activations *a, const pg_panel *panel,
                 const pg_tensor *m, int64_t *positions) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *c = pg_model_get_config(model);
  int64_t time, longest = 0;
  if (m->dtype != PG_F32 || m->ndim != 2 || m->shape[0] != c->vocab || m->shape[1] != c->width)
    return pg_fail(ctx, PG_EINVAL,
                   "the Hilbert range needs an F32 matrix [%lld, %lld] like the head, not %s of %d "
                   "dimensions [%lld, %lld]",
                   (long long)c->vocab, (long long)c->width, pg_dtype_name(m->dtype), m->ndim,
                   (long long)(m->ndim > 0 ? m->shape[0] : 1),
                   (long long)(m->ndim > 1 ? m->shape[1] : 1));
  for (size_t i = 0; i < panel->count; i++) longest = pg__max(longest, panel->pieces[i].length);
  pg_activations_size(a, positions, &time);
  if (longest > time)
    return pg_fail(ctx, PG_EINVAL,
                   "the panel has sequences of %lld positions, the activations hold %lld",
                   (long long)longest, (long long)time);
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

int pg_hilbert_shared(const pg_model *model, pg_activations *a, const pg_panel *panel,
                      const pg_tensor *matrix, pg_comm *comm, double *rms, float *ranges) {
  pg_context *ctx = pg_model_context(model);
  pg_panel_piece *pieces = NULL;
  int32_t *ids = NULL;
  float *all = NULL;
  int64_t positions = 1;
  int status = 0;

  PG_TRY(check(model, a, panel, matrix, &positions));
  pieces = malloc(panel->count * sizeof *pieces);
  ids = malloc((size_t)panel->tokens * sizeof *ids);
  all = malloc(2 * (size_t)panel->tokens * sizeof *all); /* in panel order; one chunk */
  if (!pieces || !ids || !all) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld Hilbert ranges", (long long)panel->tokens);
    goto fail;
  }
  memset(all, 0, (size_t)panel->tokens * sizeof *all);
  memcpy(pieces, panel->pieces, panel->count * sizeof *pieces);
  qsort(pieces, panel->count, sizeof *pieces, by_length);
  /* This rank takes every world-th piece. */
  size_t count = 0, world = (size_t)pg_comm_world(comm);
  for (size_t i = (size_t)pg_comm_rank(comm); i < panel->count; i += world)
    pieces[count++] = pieces[i];

  float *chunk = all + panel->tokens;
  for (size_t at = 0, next; at < count; at = next) {
    int64_t length = pieces[at].length, n = 0;
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "the Hilbert range was cancelled"));
    for (next = at; next < count && pieces[next].length == length && (n + 1) * length <= positions;
         next++, n++)
      memcpy(ids + n * length, panel->ids + pieces[next].first, (size_t)length * sizeof *ids);
    PG_TRY(pg_model_forward(model, a, ids, n, length, NULL));
    PG_TRY(pg_head_ranges(model, a, matrix, 0, n * length, chunk));
    for (int64_t k = 0; k < n; k++)
      memcpy(all + pieces[at + (size_t)k].first, chunk + k * length, (size_t)length * sizeof *all);
  }

  PG_TRY(add_ranges(comm, ctx, all, panel->tokens));
  double sum = 0;
  for (int64_t i = 0; i < panel->tokens; i++) {
    if (!isfinite(all[i]))
      PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                     "the Hilbert range of panel position %lld is %g: the "
                     "model's weights or the increment are too large or not finite",
                     (long long)i, (double)all[i]));
    sum += (double)all[i] * (double)all[i];
  }
  *rms = sqrt(sum / (double)panel->tokens);
  if (ranges) memcpy(ranges, all, (size_t)panel->tokens * sizeof *ranges);
fail:
  if (status < 0 && status != PG_ENONFINITE) pg_comm_fail(comm, pg_context_message(ctx));
  free(pieces);
  free(ids);
  free(all);
  return status;
}
