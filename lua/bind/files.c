/* core.fs: files and folders, through the core's (core/files.h) where it has them. Paths are bytes;
 * nothing here changes the working directory. */
#include "bind.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/file.h>
#include <unistd.h>

static int done(lua_State *L, struct pg_context *scratch, int status) {
  if (status < 0) return pgl_fail(L, scratch, status);
  lua_pushboolean(L, true);
  return 1;
}

/* ---- looking ------------------------------------------------------------------------------------
 */
typedef struct listing {
  struct dirent **entries;
  int count;
} listing;

static void release_listing(void *resource) {
  listing *l = resource;
  for (int i = 0; i < l->count; i++) free(l->entries[i]);
  free(l->entries);
  free(l);
}

static int visible(const struct dirent *entry) {
  return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

/* By bytes, whatever the locale. */
static int by_bytes(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static int fs_list(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  void **box = pgl_own(L, release_listing);
  listing *l = *box = calloc(1, sizeof *l);
  if (!l) return pgl_fail_text(L, PG_ENOMEM, NULL);
  int count = scandir(path, &l->entries, visible, by_bytes);
  if (count < 0) return pgl_fail_errno(L, errno, "list", path);
  l->count = count;
  lua_createtable(L, count, 0);
  for (int i = 0; i < count; i++) {
    lua_pushstring(L, l->entries[i]->d_name);
    lua_rawseti(L, -2, i + 1);
  }
  pgl_disown(box);
  return 1;
}

static int fs_exists(lua_State *L) {
  struct stat s;
  lua_pushboolean(L, stat(pgl_string(L, 1, "path"), &s) == 0);
  return 1;
}

static int fs_kind(lua_State *L) {
  struct stat s;
  if (stat(pgl_string(L, 1, "path"), &s) != 0)
    lua_pushnil(L);
  else
    lua_pushstring(L, S_ISDIR(s.st_mode) ? "directory" : S_ISREG(s.st_mode) ? "file" : "other");
  return 1;
}

static int fs_size(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct stat s;
  if (stat(path, &s) != 0) return pgl_fail_errno(L, errno, "look at", path);
  lua_pushinteger(L, s.st_size);
  return 1;
}

/* The absolute path without links. */
static int fs_real(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  void **box = pgl_own(L, free);
  if (!(*box = realpath(path, NULL))) return pgl_fail_errno(L, errno, "resolve", path);
  lua_pushstring(L, *box);
  pgl_disown(box);
  return 1;
}

/* Bytes free to this user on the file system of a path. */
static int fs_free(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct statvfs s;
  if (statvfs(path, &s) != 0) return pgl_fail_errno(L, errno, "look at the file system of", path);
  lua_pushinteger(L, (lua_Integer)s.f_bavail * (lua_Integer)s.f_frsize);
  return 1;
}

static int fs_cwd(lua_State *L) {
  void **box = pgl_own(L, free);
  if (!(*box = getcwd(NULL, 0))) return pgl_fail_errno(L, errno, "find", "the working directory");
  lua_pushstring(L, *box);
  return 1;
}

/* ---- contents -----------------------------------------------------------------------------------
 */
static int fs_read(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  char *data = NULL;
  size_t size = 0;
  void **box = pgl_own(L, free);
  pgl_scratch(&scratch);
  int status = pg_file_read(&scratch, path, 0, &data, &size);
  if (status < 0) return pgl_fail(L, &scratch, status);
  *box = data;
  lua_pushlstring(L, data, size);
  pgl_disown(box);
  return 1;
}

static int fs_write(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  size_t size;
  const char *text = pgl_bytes(L, 2, "text", &size);
  pgl_scratch(&scratch);
  return done(L, &scratch, pg_file_write_atomic(&scratch, path, text, size));
}

/* append(path, text): one write at the end of the file, which is created when missing. */
static int fs_append(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  size_t size;
  const char *text = pgl_bytes(L, 2, "text", &size);
  pgl_scratch(&scratch);
  int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return pgl_fail_errno(L, errno, "open", path);
  int status = pg_file_write_all(&scratch, fd, path, text, size);
  if (close(fd) != 0 && status == 0) return pgl_fail_errno(L, errno, "write", path);
  return done(L, &scratch, status);
}

static int fs_sha256(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  char hex[65];
  pgl_scratch(&scratch);
  int status = pg_file_sha256(&scratch, path, hex);
  if (status < 0) return pgl_fail(L, &scratch, status);
  lua_pushstring(L, hex);
  return 1;
}

/* ---- changing -----------------------------------------------------------------------------------
 */
static int fs_make(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  pgl_scratch(&scratch);
  return done(L, &scratch, pg_file_make_folders(&scratch, path));
}

/* make_exclusive(dir): the last component must be new; its parents are made when missing. */
static int fs_make_exclusive(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  const char *slash = strrchr(path, '/');
  struct pg_context scratch;
  pgl_scratch(&scratch);
  if (slash && slash != path) {
    const char *parent = lua_pushlstring(L, path, (size_t)(slash - path));
    int status = pg_file_make_folders(&scratch, parent);
    if (status < 0) return pgl_fail(L, &scratch, status);
  }
  if (mkdir(path, 0777) != 0) return pgl_fail_errno(L, errno, "create", path);
  lua_pushboolean(L, true);
  return 1;
}

/* A file, or a folder with everything in it; a missing one is fine. */
static int fs_remove(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct pg_context scratch;
  struct stat s;
  pgl_scratch(&scratch);
  if (lstat(path, &s) == 0 && !S_ISDIR(s.st_mode)) {
    if (unlink(path) != 0 && errno != ENOENT) return pgl_fail_errno(L, errno, "remove", path);
    lua_pushboolean(L, true);
    return 1;
  }
  return done(L, &scratch, pg_file_remove_tree(&scratch, path));
}

static int fs_rename(lua_State *L) {
  const char *from = pgl_string(L, 1, "from"), *to = pgl_string(L, 2, "to");
  if (rename(from, to) != 0) return pgl_fail_errno(L, errno, "rename", from);
  lua_pushboolean(L, true);
  return 1;
}

/* lock(folder) -> descriptor; nil, text, "ESTATE" while another process holds it. The lock ends
 * with unlock or the process. File systems without locks let everybody pass. */
static int fs_lock(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return pgl_fail_errno(L, errno, "open", path);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(fd);
    lua_pushnil(L);
    lua_pushfstring(L, "ESTATE: %s is in use by another process", path);
    lua_pushliteral(L, "ESTATE");
    return 3;
  }
  lua_pushinteger(L, fd);
  return 1;
}

static int fs_unlock(lua_State *L) {
  close((int)pgl_integer(L, 1, "descriptor", 0, INT_MAX));
  return 0;
}

static const luaL_Reg functions[] = {{"list", fs_list},
                                     {"exists", fs_exists},
                                     {"kind", fs_kind},
                                     {"size", fs_size},
                                     {"real", fs_real},
                                     {"free", fs_free},
                                     {"cwd", fs_cwd},
                                     {"read", fs_read},
                                     {"write", fs_write},
                                     {"append", fs_append},
                                     {"sha256", fs_sha256},
                                     {"make", fs_make},
                                     {"make_exclusive", fs_make_exclusive},
                                     {"remove", fs_remove},
                                     {"rename", fs_rename},
                                     {"lock", fs_lock},
                                     {"unlock", fs_unlock},
                                     {NULL, NULL}};

void pgl_open_files(lua_State *L) {
  luaL_newlib(L, functions);
  lua_setfield(L, -2, "fs");
}
