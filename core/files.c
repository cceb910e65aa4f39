/* Files: whole reads, exact reads, complete writes, atomic replacement, removal, hashes, space. */
#include "files.h"
#include "internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* The kernel moves at most 2^31 - 4096 bytes a call; 1 GiB keeps well below. */
#define CHUNK ((size_t)1 << 30)

int pg__open(pg_context *ctx, const char *path, int flags, int *fd) {
  do *fd = open(path, flags | O_CLOEXEC, 0666);
  while (*fd < 0 && errno == EINTR);
  if (*fd >= 0) return 0;
  return pg__fail_errno(ctx, flags & O_CREAT ? "create" : "open", path, errno);
}

int pg__close(pg_context *ctx, int fd, const char *path) {
  /* Linux has closed the descriptor also when close reports EINTR. */
  if (close(fd) == 0 || errno == EINTR) return 0;
  return pg__fail_errno(ctx, "close", path, errno);
}

/* Up to `size` bytes at `offset`; *got is smaller only at the end of the file. */
static int read_at(pg_context *ctx, int fd, const char *path, int64_t offset, void *data,
                   size_t size, size_t *got) {
  size_t done = 0;
  while (done < size) {
    const size_t want = size - done < CHUNK ? size - done : CHUNK;
    const ssize_t n = pread(fd, (char *)data + done, want, (off_t)(offset + (int64_t)done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return pg__fail_errno(ctx, "read", path, errno);
    if (n == 0) break;
    done += (size_t)n;
  }
  *got = done;
  return 0;
}

int pg_file_pread(pg_context *ctx, int fd, const char *path, int64_t offset, void *data,
                  size_t size) {
  size_t got = 0;
  const int status = read_at(ctx, fd, path, offset, data, size, &got);
  if (status == 0 && got < size)
    return pg_fail(ctx, PG_EFORMAT, "'%s' is truncated: it ends at byte %lld, before byte %lld",
                   path, (long long)(offset + (int64_t)got), (long long)(offset + (int64_t)size));
  return status;
}

int pg_file_write_all(pg_context *ctx, int fd, const char *path, const void *data, size_t size) {
  size_t done = 0;
  while (done < size) {
    const size_t want = size - done < CHUNK ? size - done : CHUNK;
    const ssize_t n = write(fd, (const char *)data + done, want);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return pg__fail_errno(ctx, "write", path, errno);
    done += (size_t)n;
  }
  return 0;
}

int pg__open_regular(pg_context *ctx, const char *path, int *fd, int64_t *size) {
  int status;
  struct stat info;
  *fd = -1;
  /* Without O_NONBLOCK, opening a pipe would wait for its other end. */
  PG_TRY(pg__open(ctx, path, O_RDONLY | O_NONBLOCK, fd));
  if (fstat(*fd, &info) < 0) {
    status = pg__fail_errno(ctx, "examine", path, errno);
    goto fail;
  }
  if (!S_ISREG(info.st_mode)) {
    status = pg_fail(ctx, PG_EFORMAT, "'%s' is %s, not a file", path,
                     S_ISDIR(info.st_mode) ? "a folder" : "a device or a pipe");
    goto fail;
  }
  *size = (int64_t)info.st_size;
  return 0;
fail:
  if (*fd >= 0) close(*fd);
  *fd = -1;
  return status;
}

int pg_file_read(pg_context *ctx, const char *path, int64_t limit, char **data, size_t *size) {
  int fd = -1, status;
  int64_t length;
  char *text = NULL;

  *data = NULL;
  *size = 0;
  PG_TRY(pg__open_regular(ctx, path, &fd, &length));
  if (limit > 0 && length > limit) {
    status = pg_fail(ctx, PG_EFORMAT, "'%s' has %lld bytes; at most %lld are expected", path,
                     (long long)length, (long long)limit);
    goto fail;
  }
  if (!(text = malloc((size_t)length + 1))) {
    status = pg_fail(ctx, PG_ENOMEM, "the %lld bytes of '%s' do not fit in memory",
                     (long long)length, path);
    goto fail;
  }
  PG_TRY(read_at(ctx, fd, path, 0, text, (size_t)length, size));
  text[*size] = 0;
  *data = text;
  text = NULL;
fail:
  free(text);
  if (fd >= 0) close(fd);
  return status;
}

/* ---- writing --------------------------------------------------------------------------- */
int pg__sync(pg_context *ctx, int fd, const char *path) {
  int result;
  do result = fsync(fd);
  while (result < 0 && errno == EINTR);
  /* Some file systems cannot sync a folder (EINVAL); nothing more can be done there. */
  if (result < 0 && errno != EINVAL && errno != EROFS)
    return pg__fail_errno(ctx, "sync", path, errno);
  return 0;
}

int pg_file_sync(pg_context *ctx, const char *path) {
  int fd = -1;
  int status = pg__open(ctx, path, O_RDONLY, &fd);
  if (status < 0) return status;
  status = pg__sync(ctx, fd, path);
  close(fd);
  return status;
}

char *pg__parent(const char *path) {
  size_t end = strlen(path);
  while (end > 1 && path[end - 1] == '/') end--;
  while (end > 0 && path[end - 1] != '/') end--;
  while (end > 1 && path[end - 1] == '/') end--;
  return end == 0 ? strdup(".") : strndup(path, end);
}

/* What the name `path` stands for may be replaced by a file: nothing, or a regular one. A device
 * or a pipe would be lost for everybody. */
static int replaceable(pg_context *ctx, const char *path) {
  struct stat info;
  if (stat(path, &info) < 0 || S_ISREG(info.st_mode)) return 0;
  return pg_fail(ctx, PG_EIO, "cannot replace '%s': %s, expected a new name or a regular file",
                 path, S_ISDIR(info.st_mode) ? "Is a directory" : "a device, pipe or socket");
}

int pg_file_write_atomic(pg_context *ctx, const char *path, const void *data, size_t size) {
  int fd = -1, status;
  char *temporary = NULL, *folder = pg__parent(path);
  bool created = false;

  PG_TRY(replaceable(ctx, path));
  if (!folder || asprintf(&temporary, "%s.tmp-%ld", path, (long)getpid()) < 0) {
    temporary = NULL;
    status = pg_fail(ctx, PG_ENOMEM, "the path '%s' does not fit in memory", path);
    goto fail;
  }
  PG_TRY(pg__open(ctx, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, &fd));
  created = true;
  PG_TRY(pg_file_write_all(ctx, fd, temporary, data, size));
  PG_TRY(pg__sync(ctx, fd, temporary));
  status = pg__close(ctx, fd, temporary);
  fd = -1;
  if (status < 0) goto fail;
  if (rename(temporary, path) < 0) {
    status = pg__fail_errno(ctx, "replace", path, errno);
    goto fail;
  }
  created = false;
  PG_TRY(pg_file_sync(ctx, folder));
fail:
  if (fd >= 0) close(fd);
  if (created) unlink(temporary);
  free(temporary);
  free(folder);
  return status;
}

/* ---- folders --------------------------------------------------------------------------- */
/* Empty the folder open at `fd`, which this closes. Names are resolved relative to it and links are
 * never followed, so nothing outside the tree can be reached even if it changes meanwhile. */
static int remove_contents(pg_context *ctx, int fd, const char *path) {
  int status = 0;
  struct dirent *entry;
  DIR *folder = fdopendir(fd);
  if (!folder) {
    status = pg__fail_errno(ctx, "list", path, errno);
    close(fd);
    return status;
  }
  while (errno = 0, (entry = readdir(folder))) {
    const char *name = entry->d_name;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
    if (unlinkat(fd, name, 0) == 0 || errno == ENOENT) continue;
    if (errno != EISDIR && errno != EPERM) {
      status = pg__fail_errno(ctx, "remove", name, errno);
      goto fail;
    }
    const int inner = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (inner < 0) {
      status = pg__fail_errno(ctx, "remove", name, errno);
      goto fail;
    }
    PG_TRY(remove_contents(ctx, inner, name));
    if (unlinkat(fd, name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
      status = pg__fail_errno(ctx, "remove", name, errno);
      goto fail;
    }
  }
  if (errno) status = pg__fail_errno(ctx, "list", path, errno);
fail:
  closedir(folder);
  return status;
}

int pg_file_remove_tree(pg_context *ctx, const char *path) {
  struct stat info;
  if (lstat(path, &info) < 0)
    return errno == ENOENT ? 0 : pg__fail_errno(ctx, "remove", path, errno);
  if (!S_ISDIR(info.st_mode)) {
    if (unlink(path) == 0 || errno == ENOENT) return 0;
    return pg__fail_errno(ctx, "remove", path, errno);
  }
  const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return pg__fail_errno(ctx, "remove", path, errno);
  const int status = remove_contents(ctx, fd, path);
  if (status < 0) return status;
  if (rmdir(path) == 0 || errno == ENOENT) return 0;
  return pg__fail_errno(ctx, "remove", path, errno);
}

int pg_file_make_folders(pg_context *ctx, const char *path) {
  int status = 0;
  struct stat info;
  char *part = strdup(path);
  if (!part) return pg_fail(ctx, PG_ENOMEM, "the path '%s' does not fit in memory", path);
  for (char *at = part;;) {
    at += strspn(at, "/");
    at += strcspn(at, "/");
    const char end = *at;
    *at = 0;
    /* Some systems answer EROFS or EACCES for an existing folder, so a failure is looked at. */
    if (mkdir(part, 0777) < 0) {
      const int error = errno;
      if (stat(part, &info) < 0 || !S_ISDIR(info.st_mode)) {
        status = error == EEXIST ? pg_fail(ctx, PG_EEXIST, "'%s' exists and is not a folder", part)
                                 : pg__fail_errno(ctx, "create folder", part, error);
        break;
      }
    }
    if (!end) break;
    *at = end;
  }
  free(part);
  return status;
}

int pg_file_require_space(pg_context *ctx, const char *path, int64_t bytes) {
  struct statvfs info;
  int result, status = 0;
  char *place = strdup(path);
  /* A path yet to be created counts for the nearest folder above it. */
  while (place) {
    do result = statvfs(place, &info);
    while (result < 0 && errno == EINTR);
    if (result == 0 || errno != ENOENT) break;
    char *parent = pg__parent(place);
    const bool top = parent && strcmp(parent, place) == 0;
    free(place);
    place = parent;
    if (top) break;
  }
  if (!place) return pg_fail(ctx, PG_ENOMEM, "the path '%s' does not fit in memory", path);
  if (result < 0) {
    status = pg__fail_errno(ctx, "examine the file system of", path, errno);
  } else {
    const double available = (double)info.f_bavail * (double)info.f_frsize;
    if (available < (double)bytes)
      status =
          pg_fail(ctx, PG_ENOSPC,
                  "'%s' needs %lld bytes (%.3f GiB), but its file system has %.0f (%.3f GiB) "
                  "free",
                  path, (long long)bytes, (double)bytes / 0x1p30, available, available / 0x1p30);
  }
  free(place);
  return status;
}

/* ---- hashes ---------------------------------------------------------------------------- */
static void to_hex(const unsigned char digest[32], char hex[65]) {
  for (int i = 0; i < 32; i++) {
    hex[2 * i] = "0123456789abcdef"[digest[i] >> 4];
    hex[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
  }
  hex[64] = 0;
}

int pg_file_sha256(pg_context *ctx, const char *path, char hex[65]) {
  enum { BUFFER = 1 << 20 };
  int fd = -1, status;
  int64_t length, offset = 0;
  size_t got = 0;
  unsigned char digest[32];
  EVP_MD_CTX *hash = EVP_MD_CTX_new();
  char *buffer = malloc(BUFFER);

  if (!hash || !buffer || !EVP_DigestInit_ex(hash, EVP_sha256(), NULL)) {
    status = pg_fail(ctx, PG_ENOMEM, "hashing '%s' needs %d bytes of memory", path, BUFFER);
    goto fail;
  }
  PG_TRY(pg__open_regular(ctx, path, &fd, &length));
  do {
    PG_TRY(read_at(ctx, fd, path, offset, buffer, BUFFER, &got));
    EVP_DigestUpdate(hash, buffer, got);
    offset += (int64_t)got;
  } while (got == BUFFER);
  EVP_DigestFinal_ex(hash, digest, NULL);
  to_hex(digest, hex);
fail:
  if (fd >= 0) close(fd);
  free(buffer);
  EVP_MD_CTX_free(hash);
  return status;
}

void pg_sha256(const void *data, size_t size, char hex[65]) {
  unsigned char digest[32] = {0};
  EVP_Digest(data, size, digest, NULL, EVP_sha256(), NULL);
  to_hex(digest, hex);
}
