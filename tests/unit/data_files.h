/* Temporary folders and shards for the tests of the data. */
#ifndef PG_TEST_DATA_FILES_H
#define PG_TEST_DATA_FILES_H

#include "core/perigee.h"
#include "unit.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static inline pg_context *data_context(void) {
  pg_context *ctx = NULL;
  char message[256] = "";
  if (pg_context_new(&(pg_context_options){.threads = 1}, &ctx, message, sizeof message) < 0) {
    printf("not ok context: %s\n", message);
    exit(1);
  }
  return ctx;
}

/* A new folder under /tmp, into `path`; removed by data_folder_remove. */
static inline void data_folder(char path[64]) {
  snprintf(path, 64, "/tmp/perigee-XXXXXX");
  if (!mkdtemp(path)) {
    printf("not ok mkdtemp\n");
    exit(1);
  }
}

static inline void data_folder_remove(const char *path) {
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", path);
  if (system(command) != 0) printf("cannot remove %s\n", path);
}

/* One of 64 buffers in turn. */
static inline char *data_path(const char *folder, const char *name) {
  static char paths[64][256];
  static int next;
  char *path = paths[next = (next + 1) % 64], made[256]; /* folder may be another of the buffers */
  snprintf(made, sizeof made, "%s/%s", folder, name);
  return memcpy(path, made, sizeof made);
}

/* A file of a header (magic, version, count, then `reserved` in the next word) and raw tokens. */
static inline void data_raw_shard(const char *path, int32_t magic, int32_t version, int32_t count,
                                  int32_t reserved, const uint16_t *tokens, size_t n) {
  int32_t header[256] = {magic, version, count, reserved};
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(header, sizeof header, 1, f) != 1 || (n > 0 && fwrite(tokens, 2, n, f) != n))
    exit(1);
  fclose(f);
}

/* A sparse shard of `count` zero tokens. */
static inline void data_sparse_shard(const char *path, int32_t count) {
  data_raw_shard(path, PG_SHARD_MAGIC, 1, count, 0, NULL, 0);
  if (truncate(path, 1024 + 2 * (off_t)count) != 0) exit(1);
}

static inline void data_poke(const char *path, int64_t token, const uint16_t *values, size_t n) {
  int fd = open(path, O_WRONLY);
  if (fd < 0 || pwrite(fd, values, 2 * n, 1024 + 2 * token) != (ssize_t)(2 * n)) exit(1);
  close(fd);
}

/* A shard of first, first + 1, … modulo `modulus`. */
static inline void data_count_shard(pg_context *ctx, const char *path, int32_t first, int64_t count,
                                    int32_t modulus) {
  int32_t *tokens = malloc((size_t)count * sizeof *tokens);
  for (int64_t i = 0; i < count; i++) tokens[i] = (int32_t)((first + i) % modulus);
  int status = pg_shard_write(ctx, path, tokens, count);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  free(tokens);
}

#endif
