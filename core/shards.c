/* Shards of tokens: 256 little-endian int32 (magic, version 1, token count, zeros), then one
 * little-endian uint16 per token. Nothing here maps files: a shard that another program truncates
 * must give an error, never a SIGBUS. */
#include "shards_internal.h"
#include "files.h"
#include "internal.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are read as they lie on disk");

#define SHARD_BLOCK (1 << 19) /* tokens per read of a scan: 1 MiB */

int pg__shard_check(pg_context *ctx, int fd, const char *path, struct stat *info, int64_t *count) {
  int status;
  int32_t header[PG_SHARD_HEADER / 4];
  if (fstat(fd, info) < 0)
    return pg_fail(ctx, PG_EIO, "shard %s cannot be examined: %s", path, strerror(errno));
  if (!S_ISREG(info->st_mode))
    return pg_fail(ctx, PG_EFORMAT, "shard %s is not a regular file", path);
  if (info->st_size < PG_SHARD_HEADER)
    return pg_fail(ctx, PG_EFORMAT,
                   "shard %s: its size is %lld bytes, smaller than the header of %d bytes", path,
                   (long long)info->st_size, PG_SHARD_HEADER);
  PG_TRY(pg_file_pread(ctx, fd, path, 0, header, sizeof header));
  if (header[0] != PG_SHARD_MAGIC)
    return pg_fail(ctx, PG_EFORMAT, "shard %s: header magic is %d, expected %d", path, header[0],
                   PG_SHARD_MAGIC);
  if (header[1] != 1)
    return pg_fail(ctx, PG_EFORMAT, "shard %s: header version is %d, expected 1", path, header[1]);
  if (header[2] < 2)
    return pg_fail(ctx, PG_EFORMAT, "shard %s: header token count is %d, expected at least 2", path,
                   header[2]);
  for (int i = 3; i < PG_SHARD_HEADER / 4; i++)
    if (header[i])
      return pg_fail(ctx, PG_EFORMAT, "shard %s: reserved header word %d is %d, expected 0", path,
                     i, header[i]);
  int64_t expected = PG_SHARD_HEADER + 2 * (int64_t)header[2];
  if (info->st_size != expected)
    return pg_fail(ctx, PG_EFORMAT,
                   "shard %s: header token count is %d, so its size should be %lld bytes, but it "
                   "is %lld",
                   path, header[2], (long long)expected, (long long)info->st_size);
  *count = header[2];
  return 0;
fail:
  return status;
}

static int shard_open(pg_context *ctx, const char *folder, const char *name, pg_shard *shard) {
  int status, fd = -1;
  struct stat info;
  shard->name = strdup(name);
  if (asprintf(&shard->path, "%s/%s", folder, name) < 0) shard->path = NULL;
  if (!shard->name || !shard->path) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for shard names"));
  fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    PG_TRY(pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "shard %s cannot be opened: %s",
                   shard->path, strerror(errno)));
  PG_TRY(pg__shard_check(ctx, fd, shard->path, &info, &shard->tokens));
  shard->bytes = info.st_size;
  status = 0;
fail:
  if (fd >= 0) close(fd);
  return status;
}

static int compare_names(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

static void names_free(char **names, size_t count) {
  for (size_t i = 0; i < count; i++) free(names[i]);
  free(names);
}

/* Sorted names in `folder` that match one of two globs (the second may be NULL). */
static int names_list(pg_context *ctx, const char *folder, const char *first, const char *second,
                      char ***out, size_t *count) {
  int status = 0;
  char **names = NULL;
  size_t n = 0, capacity = 0;
  DIR *dir = opendir(folder);
  if (!dir)
    return pg_fail(ctx, errno == ENOENT || errno == ENOTDIR ? PG_ENOENT : PG_EIO,
                   "data folder %s cannot be listed: %s", folder, strerror(errno));
  for (;;) {
    errno = 0;
    struct dirent *entry = readdir(dir);
    if (!entry) {
      if (errno)
        status =
            pg_fail(ctx, PG_EIO, "data folder %s cannot be listed: %s", folder, strerror(errno));
      break;
    }
    if (fnmatch(first, entry->d_name, FNM_PERIOD) != 0 &&
        (!second || fnmatch(second, entry->d_name, FNM_PERIOD) != 0))
      continue;
    if (n == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      char **larger = realloc(names, capacity * sizeof *names);
      if (larger) names = larger;
      if (!larger) status = PG_ENOMEM;
    }
    if (status == 0 && !(names[n] = strdup(entry->d_name))) status = PG_ENOMEM;
    if (status < 0) {
      pg_fail(ctx, status, "no memory for the names in %s", folder);
      break;
    }
    n++;
  }
  closedir(dir);
  if (status < 0) {
    names_free(names, n);
    return status;
  }
  if (n) qsort(names, n, sizeof *names, compare_names);
  *out = names;
  *count = n;
  return 0;
}

static int shards_from_names(pg_context *ctx, const char *folder, char **names, size_t count,
                             pg_shards **out) {
  int status = 0;
  pg_shards *shards = calloc(1, sizeof *shards);
  if (shards) shards->shards = calloc(count ? count : 1, sizeof *shards->shards);
  if (!shards || !shards->shards) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for the shard list"));
  for (size_t i = 0; i < count; i++) {
    shards->count = i + 1;
    PG_TRY(shard_open(ctx, folder, names[i], &shards->shards[i]));
    shards->tokens += shards->shards[i].tokens;
  }
  *out = shards;
  return 0;
fail:
  pg_shards_free(shards);
  return status;
}

int pg_shards_open(pg_context *ctx, const char *folder, const char *pattern, pg_shards **out) {
  *out = NULL;
  char **names;
  size_t count;
  int status = names_list(ctx, folder, pattern, NULL, &names, &count);
  if (status < 0) return status;
  if (count == 0)
    status = pg_fail(ctx, PG_ENOENT, "data folder %s holds no shard that matches \"%s\"", folder,
                     pattern);
  else
    status = shards_from_names(ctx, folder, names, count, out);
  names_free(names, count);
  return status;
}

void pg_shards_free(pg_shards *shards) {
  if (!shards) return;
  for (size_t i = 0; shards->shards && i < shards->count; i++) {
    free(shards->shards[i].name);
    free(shards->shards[i].path);
  }
  free(shards->shards);
  free(shards);
}

int pg_shard_scan(pg_context *ctx, const pg_shard *shard, int32_t *largest, int64_t *at) {
  int status, fd = -1;
  struct stat info;
  int64_t count, offset = 0;
  int32_t best = -1;
  uint16_t *block = malloc(SHARD_BLOCK * sizeof *block);
  if (!block) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to scan shard %s", shard->path));
  fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    PG_TRY(pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "shard %s cannot be opened: %s",
                   shard->path, strerror(errno)));
  PG_TRY(pg__shard_check(ctx, fd, shard->path, &info, &count));
  while (offset < count) {
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "scanning shard %s was cancelled", shard->path));
    int64_t n = pg__min(SHARD_BLOCK, count - offset);
    PG_TRY(pg_file_pread(ctx, fd, shard->path, PG_SHARD_HEADER + 2 * offset, block, (size_t)n * 2));
    int32_t top = pg__tokens_largest(block, n);
    if (top > best) {
      best = top;
      int64_t i = 0;
      while (block[i] != top) i++;
      *at = offset + i;
    }
    offset += n;
  }
  *largest = best;
  status = 0;
fail:
  if (fd >= 0) close(fd);
  free(block);
  return status;
}

int32_t pg__tokens_largest(const uint16_t *tokens, int64_t count) {
  uint16_t top = 0;
  for (int64_t i = 0; i < count; i++) top = tokens[i] > top ? tokens[i] : top;
  return top;
}

int pg_shards_identity(pg_context *ctx, const pg_shards *shards, char hex[65]) {
  char *text = NULL;
  size_t size = 0;
  FILE *lines = open_memstream(&text, &size);
  if (!lines) return pg_fail(ctx, PG_ENOMEM, "no memory for the identity of the shards");
  for (size_t i = 0; i < shards->count; i++)
    fprintf(lines, "%s\t%lld\t%lld\n", shards->shards[i].name, (long long)shards->shards[i].bytes,
            (long long)shards->shards[i].tokens);
  bool bad = ferror(lines);
  if (fclose(lines) != 0 || bad) {
    free(text);
    return pg_fail(ctx, PG_ENOMEM, "no memory for the identity of the shards");
  }
  pg_sha256(text, size, hex);
  free(text);
  return 0;
}

/* All shards of a dataset, of both splits. */
static int open_all(pg_context *ctx, const char *folder, pg_shards **out) {
  int status;
  char **names = NULL;
  size_t count = 0;
  PG_TRY(names_list(ctx, folder, "*_train_*.bin", "*_val_*.bin", &names, &count));
  if (count == 0) {
    /* Splits named otherwise: every *.bin file belongs to the dataset. */
    names_free(names, count);
    names = NULL;
    PG_TRY(names_list(ctx, folder, "*.bin", NULL, &names, &count));
  }
  if (count == 0) PG_TRY(pg_fail(ctx, PG_ENOENT, "data folder %s holds no shard (*.bin)", folder));
  PG_TRY(shards_from_names(ctx, folder, names, count, out));
fail:
  names_free(names, count);
  return status;
}

int pg_shards_digest(pg_context *ctx, const char *folder, char hex[65]) {
  int status;
  pg_shards *shards = NULL;
  PG_TRY(open_all(ctx, folder, &shards));
  PG_TRY(pg_shards_identity(ctx, shards, hex));
fail:
  pg_shards_free(shards);
  return status;
}

/* Header and at most `most` blocks of a shard into sample[SAMPLE_BYTES]; the rest of that is zero.
 * All shards together are few reads, which a network file system takes in seconds. */
enum { SAMPLE_BLOCK = 4096, SAMPLE_BLOCKS = 64, SAMPLE_LEAST = 4, SAMPLE_READS = 4096 };
enum { SAMPLE_BYTES = PG_SHARD_HEADER + SAMPLE_BLOCK * SAMPLE_BLOCKS };

static int sample_shard(pg_context *ctx, const pg_shard *shard, int64_t most, char *sample) {
  const int64_t bytes = 2 * shard->tokens, last = pg__max(0, bytes - SAMPLE_BLOCK);
  const int64_t blocks = pg__min(most, (bytes + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK);
  int status;
  memset(sample, 0, SAMPLE_BYTES);
  const int fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    return pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "shard %s cannot be opened: %s",
                   shard->path, strerror(errno));
  PG_TRY(pg_file_pread(ctx, fd, shard->path, 0, sample, PG_SHARD_HEADER));
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t at =
        blocks > 1 ? last / (blocks - 1) * b + last % (blocks - 1) * b / (blocks - 1) : 0;
    PG_TRY(pg_file_pread(ctx, fd, shard->path, PG_SHARD_HEADER + at,
                         sample + PG_SHARD_HEADER + b * SAMPLE_BLOCK,
                         (size_t)pg__min(SAMPLE_BLOCK, bytes - at)));
  }
fail:
  close(fd);
  return status;
}

int pg_shards_sample(pg_context *ctx, const char *folder, char hex[65]) {
  int status;
  int64_t most;
  pg_shards *shards = NULL;
  char *lines = NULL, *sample = malloc(SAMPLE_BYTES);
  if (!sample) return pg_fail(ctx, PG_ENOMEM, "no memory to sample the shards");
  PG_TRY(open_all(ctx, folder, &shards));
  lines = calloc(shards->count + 1, 64);
  if (!lines) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to sample the shards"));
  PG_TRY(pg_shards_identity(ctx, shards, hex));
  memcpy(lines, hex, 64);
  most = pg__min(SAMPLE_BLOCKS, pg__max(SAMPLE_LEAST, SAMPLE_READS / (int64_t)shards->count));
  for (size_t i = 0; i < shards->count; i++) {
    PG_TRY(sample_shard(ctx, &shards->shards[i], most, sample));
    pg_sha256(sample, SAMPLE_BYTES, hex);
    memcpy(lines + 64 * (i + 1), hex, 64);
  }
  pg_sha256(lines, 64 * (shards->count + 1), hex);
fail:
  pg_shards_free(shards);
  free(lines);
  free(sample);
  return status;
}

int64_t pg_shards_updates_per_epoch(const pg_shards *shards, int64_t time, int64_t batch) {
  int64_t updates = 0;
  if (time < 1 || batch < 1) return 0;
  for (size_t i = 0; i < shards->count; i++)
    updates += (shards->shards[i].tokens - 1) / time / batch;
  return updates;
}

/* ---- writing --------------------------------------------------------------------------------- */
int pg__shard_writer_open(pg_context *ctx, const char *path, int64_t count, pg__shard_writer *w) {
  int status;
  int32_t header[PG_SHARD_HEADER / 4] = {PG_SHARD_MAGIC, 1, (int32_t)count};
  *w = (pg__shard_writer){.context = ctx, .fd = -1, .left = count};
  if (count < 2 || count > INT32_MAX)
    return pg_fail(ctx, PG_EINVAL, "shard %s: %lld tokens do not fit, allowed are 2 to %d", path,
                   (long long)count, INT32_MAX);
  w->path = strdup(path);
  if (asprintf(&w->temporary, "%s.tmp-%ld", path, (long)getpid()) < 0) w->temporary = NULL;
  if (!w->path || !w->temporary) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to write %s", path));
  w->fd = open(w->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (w->fd < 0)
    PG_TRY(pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "%s cannot be created: %s",
                   w->temporary, strerror(errno)));
  PG_TRY(pg_file_write_all(ctx, w->fd, w->temporary, header, sizeof header));
  return 0;
fail:
  pg__shard_writer_abandon(w);
  return status;
}

int pg__shard_writer_append(pg__shard_writer *w, const uint16_t *tokens, int64_t count) {
  if (count > w->left)
    return pg_fail(w->context, PG_EINVAL, "shard %s: more tokens than its header announces",
                   w->path);
  w->left -= count;
  return pg_file_write_all(w->context, w->fd, w->temporary, tokens, (size_t)count * 2);
}

int pg__shard_writer_close(pg__shard_writer *w) {
  int status;
  if (w->left)
    PG_TRY(pg_fail(w->context, PG_EINVAL, "shard %s: %lld tokens are missing", w->path,
                   (long long)w->left));
  if (fsync(w->fd) < 0)
    PG_TRY(pg_fail(w->context, errno == ENOSPC ? PG_ENOSPC : PG_EIO, "%s cannot be written: %s",
                   w->temporary, strerror(errno)));
  int fd = w->fd;
  w->fd = -1;
  if (close(fd) < 0 || rename(w->temporary, w->path) < 0)
    PG_TRY(pg_fail(w->context, PG_EIO, "%s cannot be written: %s", w->path, strerror(errno)));
  free(w->path);
  free(w->temporary);
  *w = (pg__shard_writer){.fd = -1};
  return 0;
fail:
  pg__shard_writer_abandon(w);
  return status;
}

void pg__shard_writer_abandon(pg__shard_writer *w) {
  if (w->fd >= 0) close(w->fd);
  if (w->temporary) unlink(w->temporary);
  free(w->path);
  free(w->temporary);
  *w = (pg__shard_writer){.fd = -1};
}

int pg_shard_write(pg_context *ctx, const char *path, const int32_t *tokens, int64_t count) {
  int status;
  pg__shard_writer w = {.fd = -1};
  uint16_t *block = malloc(SHARD_BLOCK * sizeof *block);
  if (!block) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to write shard %s", path));
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] > UINT16_MAX)
      PG_TRY(pg_fail(ctx, PG_EFORMAT,
                     "shard %s: token id %d at offset %lld does not fit its 16 bits, allowed are 0 "
                     "to 65535",
                     path, tokens[i], (long long)i));
  PG_TRY(pg__shard_writer_open(ctx, path, count, &w));
  for (int64_t at = 0; at < count; at += SHARD_BLOCK) {
    int64_t n = pg__min(SHARD_BLOCK, count - at);
    for (int64_t i = 0; i < n; i++) block[i] = (uint16_t)tokens[at + i];
    PG_TRY(pg__shard_writer_append(&w, block, n));
  }
  status = pg__shard_writer_close(&w);
  free(block);
  return status;
fail:
  pg__shard_writer_abandon(&w);
  free(block);
  return status;
}
