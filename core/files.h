/* Files: whole-file reads, atomic writes, SHA-256, free space. All sizes are 64-bit; short reads,
 * short writes and EINTR are handled. Messages name the path and the system's reason. */
#ifndef PG_FILES_H
#define PG_FILES_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Read a whole regular file into malloc'ed memory with a NUL after it. PG_EFORMAT when it is
 * larger than `limit` bytes (0: no limit). */
int pg_file_read(pg_context *ctx, const char *path, int64_t limit, char **data, size_t *size);
/* Read exactly `size` bytes at `offset`; fewer is PG_EFORMAT ("is truncated"). */
int pg_file_pread(pg_context *ctx, int fd, const char *path, int64_t offset, void *data,
                  size_t size);
int pg_file_write_all(pg_context *ctx, int fd, const char *path, const void *data, size_t size);
/* Write to PATH.tmp-PID, fsync, rename over PATH, fsync the folder. Nothing half-written remains.
 */
int pg_file_write_atomic(pg_context *ctx, const char *path, const void *data, size_t size);
/* fsync a file or a folder by path. */
int pg_file_sync(pg_context *ctx, const char *path);
/* Remove a folder with everything in it; a missing one is fine. */
int pg_file_remove_tree(pg_context *ctx, const char *path);
/* Create a folder and its parents; existing ones are fine. */
int pg_file_make_folders(pg_context *ctx, const char *path);
/* PG_ENOSPC, with both numbers, when the file system of `path` has less than `bytes` free. */
int pg_file_require_space(pg_context *ctx, const char *path, int64_t bytes);
/* Hex SHA-256 (64 characters and NUL) of a file or of memory. */
int pg_file_sha256(pg_context *ctx, const char *path, char hex[65]);
void pg_sha256(const void *data, size_t size, char hex[65]);

#ifdef __cplusplus
}
#endif
#endif
