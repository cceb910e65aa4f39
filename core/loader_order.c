/* The data order of the published runs (SPEC §2). Every epoch shuffles the shards with entropy
 * [seed, epoch, 0] and, inside shard i, the order of whole optimizer batches with
 * [seed, epoch, i, 1]; the shuffle is NumPy's. Sequences that do not fill a batch are dropped. */
#include "internal.h"
#include "loader_internal.h"
#include "random.h"
#include <stdlib.h>

static int64_t shard_batches(const pg__order *o, int64_t shard) {
  return (o->shards->shards[shard].tokens - 1) / o->time / o->batch;
}

int pg__order_init(pg_context *ctx, pg__order *order, const pg_shards *shards,
                   const pg_loader_options *options) {
  int status;
  *order = (pg__order){.shards = shards,
                       .time = options->time,
                       .batch = options->batch,
                       .seed = options->seed,
                       .shuffle = options->shuffle,
                       .shard_epoch = -1,
                       .batch_epoch = -1};
  int64_t most = 0, largest = 0;
  for (size_t i = 0; i < shards->count; i++) {
    most = pg__max(most, shard_batches(order, (int64_t)i));
    largest = pg__max(largest, (shards->shards[i].tokens - 1) / order->time);
  }
  if (most == 0)
    return pg_fail(ctx, PG_EDATA,
                   "the data in %s (%s) is too small: the largest shard holds %lld sequences of "
                   "%lld tokens, one %s needs %lld",
                   options->folder, options->pattern, (long long)largest, (long long)order->time,
                   order->shuffle ? "optimizer batch" : "group of sequences",
                   (long long)order->batch);
  if (order->shuffle) {
    order->batch_capacity = most;
    order->shard_order = malloc(shards->count * sizeof *order->shard_order);
    order->batch_order = malloc((size_t)most * sizeof *order->batch_order);
    if (!order->shard_order || !order->batch_order)
      PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for the order of %lld batches", (long long)most));
  }
  PG_TRY(pg__order_seek(ctx, order, &(pg_loader_state){0}));
  return 0;
fail:
  pg__order_free(order);
  return status;
}

void pg__order_free(pg__order *order) {
  free(order->shard_order);
  free(order->batch_order);
  *order = (pg__order){0};
}

static int64_t shard_at(const pg__order *o, int64_t position) {
  return o->shuffle ? o->shard_order[position] : position;
}

static void shuffle_shards(pg__order *o) {
  if (!o->shuffle || o->shard_epoch == o->at.epoch) return;
  pg_pcg64 rng;
  pg_pcg64_seed(&rng, (uint64_t[]){o->seed, (uint64_t)o->at.epoch, 0}, 3);
  pg_shuffle(&rng, o->shard_order, (int64_t)o->shards->count);
  o->shard_epoch = o->at.epoch;
}

/* From a position that may lie behind a shard's last batch to the next batch that exists. */
static void normalise(pg__order *o) {
  int64_t count = (int64_t)o->shards->count;
  shuffle_shards(o);
  while (o->at.shard_position < count &&
         o->at.batch_position >= shard_batches(o, shard_at(o, o->at.shard_position))) {
    o->at.batch_position = 0;
    o->at.shard_position++;
    if (o->at.shard_position == count && o->shuffle) {
      o->at.shard_position = 0;
      o->at.epoch++;
      shuffle_shards(o);
    }
  }
  if (!o->shuffle || o->at.shard_position == count) return;
  int64_t shard = shard_at(o, o->at.shard_position);
  if (o->batch_epoch == o->at.epoch && o->batch_shard == shard) return;
  pg_pcg64 rng;
  pg_pcg64_seed(&rng, (uint64_t[]){o->seed, (uint64_t)o->at.epoch, (uint64_t)shard, 1}, 4);
  pg_shuffle(&rng, o->batch_order, shard_batches(o, shard));
  o->batch_epoch = o->at.epoch;
  o->batch_shard = shard;
}

int pg__order_seek(pg_context *ctx, pg__order *order, const pg_loader_state *state) {
  int64_t count = (int64_t)order->shards->count;
  if (state->epoch < 0 || state->batches < 0 || state->batch_position < 0 ||
      (!order->shuffle && state->epoch != 0) || state->epoch == INT64_MAX)
    return pg_fail(ctx, PG_EDATA, "data position: epoch %lld, batch %lld, %lld batches is not one",
                   (long long)state->epoch, (long long)state->batch_position,
                   (long long)state->batches);
  if (state->shard_position < 0 || state->shard_position > count - (order->shuffle ? 1 : 0))
    return pg_fail(ctx, PG_EDATA, "data position: shard %lld, but the data has %lld shards",
                   (long long)state->shard_position, (long long)count);
  pg_loader_state before = order->at;
  order->at = *state;
  shuffle_shards(order);
  int64_t batches = state->shard_position == count
                        ? 0
                        : shard_batches(order, shard_at(order, state->shard_position));
  if (state->batch_position > batches) {
    order->at = before;
    shuffle_shards(order);
    return pg_fail(ctx, PG_EDATA,
                   "data position: batch %lld of shard position %lld, but that shard holds %lld",
                   (long long)state->batch_position, (long long)state->shard_position,
                   (long long)batches);
  }
  normalise(order);
  return 0;
}

bool pg__order_ended(const pg__order *order) {
  return order->at.shard_position == (int64_t)order->shards->count;
}

void pg__order_current(const pg__order *order, int64_t *shard, int64_t *sequence) {
  int64_t batch = order->at.batch_position;
  *shard = shard_at(order, order->at.shard_position);
  *sequence = (order->shuffle ? order->batch_order[batch] : batch) * order->batch;
}

void pg__order_advance(pg__order *order) {
  order->at.batch_position++;
  order->at.batches++;
  normalise(order);
}

int64_t pg__order_batches(const pg__order *order) {
  return pg_shards_updates_per_epoch(order->shards, order->time, order->batch);
}
