/* What a panel holds; read by the Hilbert diagnostic. */
#ifndef PG_PANEL_H
#define PG_PANEL_H

#include "geometry.h"
#include "internal.h"

/* The first `length` positions of a sequence. Attention is causal: they need no later token. */
typedef struct pg_panel_piece {
  int64_t length; /* 1 … time */
  int64_t first;  /* where its tokens are in panel->ids, and its positions in the panel's order */
} pg_panel_piece;

struct pg_panel {
  int64_t tokens, ranks, micro, time;
  bool spread;
  int32_t *ids;     /* [tokens], input tokens of all pieces one after another */
  int32_t *targets; /* [tokens], the token after each */
  pg_panel_piece *pieces;
  size_t count;
  char hash[17];
};

/* What a pass does with a batch: `sequences` pieces of one length, their ids and targets
 * [sequences * length] one after another. Results go to pieces[k].first in the panel's order. */
typedef int pg__panel_batch_fn(void *self, const int32_t *ids, const int32_t *targets,
                               const pg_panel_piece *pieces, int64_t sequences, int64_t length);
typedef struct pg__panel_visit {
  const char *what;  /* "the Hilbert range", for messages */
  pg_comm *comm;     /* every rank takes some pieces; NULL: all are ours */
  int64_t positions; /* that fit the activations at once */
  int64_t time;      /* longest sequence that fits */
  pg__panel_batch_fn *batch;
  void *self;
} pg__panel_visit;
/* Longest pieces first. Polls cancellation between batches. */
int pg__panel_pass(pg_context *ctx, const pg_panel *panel, const pg__panel_visit *visit);

#endif
