/* Inside the core: checking and streaming of shards, shared by shards.c, loader.c, prepare.c. */
#ifndef PG_SHARDS_INTERNAL_H
#define PG_SHARDS_INTERNAL_H

#include "data.h"
#include <sys/stat.h>

/* Header and size of the open file `fd`; its identity and token count. PG_EFORMAT when bad. */
int pg__shard_check(pg_context *ctx, int fd, const char *path, struct stat *info, int64_t *count);

/* The largest of `count` tokens; 0 when there is none. */
int32_t pg__tokens_largest(const uint16_t *tokens, int64_t count);

/* Writes one shard of a size known beforehand, block by block. After a failed call, and after
 * close, the writer is empty and nothing lies under a temporary name. */
typedef struct pg__shard_writer {
  pg_context *context;
  char *path, *temporary;
  int fd;
  int64_t left; /* tokens still to come */
} pg__shard_writer;
int pg__shard_writer_open(pg_context *ctx, const char *path, int64_t count, pg__shard_writer *w);
int pg__shard_writer_append(pg__shard_writer *w, const uint16_t *tokens, int64_t count);
int pg__shard_writer_close(pg__shard_writer *w);
void pg__shard_writer_abandon(pg__shard_writer *w);

#endif
