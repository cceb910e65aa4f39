/* A pass over a panel: its sequences in batches of one length, shared out over ranks. */
#include "panel.h"

#include <stdlib.h>
#include <string.h>

/* Order pieces so that those of one length are neighbours and can share a forward pass; the
 * panel's own order breaks ties. */
static int by_length(const void *a, const void *b) {
  const pg_panel_piece *p = a, *q = b;
  if (p->length != q->length) return p->length > q->length ? -1 : 1;
  return (p->first > q->first) - (p->first < q->first);
}

int pg__panel_pass(pg_context *ctx, const pg_panel *panel, const pg__panel_visit *visit) {
  const size_t n = (size_t)panel->tokens, world = visit->comm ? pg_comm_world(visit->comm) : 1;
  pg_panel_piece *pieces = malloc(panel->count * sizeof *pieces);
  int32_t *ids = malloc(2 * n * sizeof *ids);
  size_t count = 0;
  int status = 0;
  if (!pieces || !ids) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for a pass over %lld positions",
                     (long long)panel->tokens);
    goto fail;
  }
  memcpy(pieces, panel->pieces, panel->count * sizeof *pieces);
  qsort(pieces, panel->count, sizeof *pieces, by_length);
  if (pieces[0].length > visit->time) {
    status = pg_fail(ctx, PG_EINVAL,
                     "the panel has sequences of %lld positions, the model's activations hold %lld",
                     (long long)pieces[0].length, (long long)visit->time);
    goto fail;
  }
  /* This rank takes every world-th piece. */
  for (size_t i = world > 1 ? (size_t)pg_comm_rank(visit->comm) : 0; i < panel->count; i += world)
    pieces[count++] = pieces[i];

  for (size_t at = 0, next; at < count; at = next) {
    const int64_t length = pieces[at].length;
    const size_t bytes = (size_t)length * sizeof *ids;
    int64_t sequences = 0;
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "%s was cancelled", visit->what));
    for (next = at; next < count && pieces[next].length == length &&
                    (sequences + 1) * length <= visit->positions;
         next++, sequences++) {
      memcpy(ids + sequences * length, panel->ids + pieces[next].first, bytes);
      memcpy(ids + n + sequences * length, panel->targets + pieces[next].first, bytes);
    }
    PG_TRY(visit->batch(visit->self, ids, ids + n, pieces + at, sequences, length));
  }
fail:
  free(pieces);
  free(ids);
  return status;
}
