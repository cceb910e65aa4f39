/* Inside the core: the order in which a loader visits optimizer batches, apart from reading. */
#ifndef PG_LOADER_INTERNAL_H
#define PG_LOADER_INTERNAL_H

#include "data.h"

typedef struct pg__order {
  const pg_shards *shards;
  int64_t time, batch; /* batch: sequences per optimizer batch, or per group when sequential */
  uint64_t seed;
  bool shuffle;
  pg_loader_state at;   /* the batch to visit next, normalised: it exists unless at the end */
  int64_t *shard_order; /* of epoch shard_epoch */
  int64_t shard_epoch;  /* -1: none yet */
  int64_t *batch_order; /* of shard batch_shard in epoch batch_epoch */
  int64_t batch_capacity, batch_shard, batch_epoch;
} pg__order;

/* PG_EDATA with both numbers when no shard holds a whole batch. `shards` must outlive the order. */
int pg__order_init(pg_context *ctx, pg__order *order, const pg_shards *shards,
                   const pg_loader_options *options);
void pg__order_free(pg__order *order);
/* Go to a saved position; PG_EDATA when the data does not have it, and nothing changes. */
int pg__order_seek(pg_context *ctx, pg__order *order, const pg_loader_state *state);
/* Only a sequential order ends. */
bool pg__order_ended(const pg__order *order);
/* Shard (index by name) and first sequence of the batch to visit next. */
void pg__order_current(const pg__order *order, int64_t *shard, int64_t *sequence);
void pg__order_advance(pg__order *order);
/* Batches in one pass. */
int64_t pg__order_batches(const pg__order *order);

#endif
