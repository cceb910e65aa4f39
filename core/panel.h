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
  int32_t *ids;     /* [tokens], input tokens of all pieces one after another */
  int32_t *targets; /* [tokens], the token after each */
  pg_panel_piece *pieces;
  size_t count;
  char hash[17];
};

#endif
