/* Training data: shards of tokens (SPEC §2, the FineWeb / llm.c format) and the loader that serves
 * them in exactly the order of the published runs, ahead of use, with bounded memory. */
#ifndef PG_DATA_H
#define PG_DATA_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PG_SHARD_MAGIC 20240520
#define PG_SHARD_HEADER 1024 /* bytes */

/* ---- shards ---------------------------------------------------------------------------- */
typedef struct pg_shard {
  char *name; /* file name without folder */
  char *path;
  int64_t bytes;  /* file size */
  int64_t tokens; /* header count, equal to (bytes - 1024) / 2 */
} pg_shard;

/* The shards of one split, sorted by name. */
typedef struct pg_shards {
  pg_shard *shards;
  size_t count;
  int64_t tokens; /* of all */
} pg_shards;

/* List the files in `folder` that match the glob `pattern` ("*_train_*.bin") and check their
 * headers and sizes. None: PG_ENOENT. A bad one: PG_EFORMAT naming file, field, value, expected. */
int pg_shards_open(pg_context *ctx, const char *folder, const char *pattern, pg_shards **out);
void pg_shards_free(pg_shards *shards);
/* Read every token of shard `index`: largest value and its first offset (token index). */
int pg_shard_scan(pg_context *ctx, const pg_shard *shard, int32_t *largest, int64_t *at);
/* Dataset identity (REFERENCE A2): SHA-256 of lines "name TAB bytes TAB tokens NEWLINE" over all
 * *.bin shards of both splits, sorted by name. */
int pg_shards_digest(pg_context *ctx, const char *folder, char hex[65]);
/* Of what the same shards hold: SHA-256 of their names, sizes, headers and at most 64 blocks of 4
 * KiB of each (fewer, but 4, of more than 64 shards), evenly spread from the first to the last. A
 * change between them goes unnoticed. */
int pg_shards_sample(pg_context *ctx, const char *folder, char hex[65]);
/* The same lines and digest over these shards alone. */
int pg_shards_identity(pg_context *ctx, const pg_shards *shards, char hex[65]);
/* Updates in one epoch: sum over shards of floor(floor((tokens-1)/time) / batch). */
int64_t pg_shards_updates_per_epoch(const pg_shards *shards, int64_t time, int64_t batch);

/* Write a shard: header plus ids as uint16, to a temporary name, then renamed. An id above 65535
 * is PG_EFORMAT. */
int pg_shard_write(pg_context *ctx, const char *path, const int32_t *tokens, int64_t count);

/* ---- loader ---------------------------------------------------------------------------- */
typedef struct pg_loader pg_loader;

typedef struct pg_loader_options {
  const char *folder, *pattern;
  int64_t time;  /* T: a sequence reads T + 1 tokens */
  int64_t batch; /* sequences per optimizer batch, over all ranks (ignored without shuffle) */
  int64_t micro; /* sequences per micro-batch on this rank; batch % (micro * world) == 0 */
  int64_t rank, world;
  int64_t vocab; /* ids >= vocab are PG_EDATA: shard, offset, value, vocabulary */
  uint64_t seed;
  bool shuffle; /* false: validation order (groups of micro * world sequences, no epochs) */
  int depth;    /* micro-batches read ahead through libuv's thread pool; 0: 4 */
} pg_loader_options;

/* Where the loader stands: before the next optimizer batch (shuffled) or group (sequential). Plain
 * numbers; saving and restoring them is exact, also with reads in flight. */
typedef struct pg_loader_state {
  int64_t epoch;
  int64_t shard_position; /* index into the epoch's shuffled shard order */
  int64_t batch_position; /* index into that shard's shuffled batch order */
  int64_t batches;        /* optimizer batches served since the start */
} pg_loader_state;

int pg_loader_open(pg_context *ctx, const pg_loader_options *options, pg_loader **out);
void pg_loader_close(pg_loader *loader);
/* The next micro-batch: inputs and targets, each [micro*time]. Micro-batch m of an optimizer batch
 * holds its sequences m*micro*world + rank*micro + [0, micro). At the end of an epoch the next one
 * begins; a sequential loader answers PG_EDATA at its end. */
int pg_loader_next(pg_loader *loader, int32_t *inputs, int32_t *targets);
/* Start of a sequential loader again. */
int pg_loader_rewind(pg_loader *loader);
/* State after the last completely served optimizer batch; set discards what was read ahead. */
void pg_loader_get_state(const pg_loader *loader, pg_loader_state *state);
int pg_loader_set_state(pg_loader *loader, const pg_loader_state *state);
/* Seconds that pg_loader_next spent waiting for reads so far. */
double pg_loader_wait_seconds(const pg_loader *loader);
/* Sum over the sequences served of the current (or last complete) optimizer batch, mod 2^64, of
 * hash(index in the optimizer batch, its T + 1 tokens): the same for every split over micro-batches
 * and, summed over ranks, over ranks. */
uint64_t pg_loader_batch_hash(const pg_loader *loader);
/* Whole groups of micro * world sequences in the split (sequential), or updates per epoch. */
int64_t pg_loader_batches(const pg_loader *loader);
const pg_shards *pg_loader_shards(const pg_loader *loader);
/* As given to open, with defaults filled in; the strings are the loader's own. */
const pg_loader_options *pg_loader_get_options(const pg_loader *loader);

#ifdef __cplusplus
}
#endif
#endif
