/* Files: complete reads and writes, atomic replacement, removal that stays inside, hashes, faults.
 */
#include "core/files.h"
#include "temporary.h"
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

static pg_context *ctx;
#define MESSAGE_HAS(text)                                                                          \
  CHECK(strstr(pg_context_message(ctx), text), "message: %s", pg_context_message(ctx))

static int exists(const char *path) {
  struct stat info;
  return lstat(path, &info) == 0;
}

TEST(read_whole_files) {
  const char *path = temporary_path("bytes");
  char *data;
  size_t size;
  put_file(path, "ab\0cd", 5);
  CHECK(pg_file_read(ctx, path, 0, &data, &size) == 0);
  CHECK(size == 5 && memcmp(data, "ab\0cd", 6) == 0, "a NUL follows");
  free(data);
  CHECK(pg_file_read(ctx, path, 5, &data, &size) == 0);
  free(data);
  CHECK(pg_file_read(ctx, path, 4, &data, &size) == PG_EFORMAT && !data && size == 0);
  MESSAGE_HAS("has 5 bytes; at most 4");
  put_file(path, "", 0);
  CHECK(pg_file_read(ctx, path, 0, &data, &size) == 0 && size == 0 && data[0] == 0);
  free(data);
  CHECK(pg_file_read(ctx, temporary_path("none"), 0, &data, &size) == PG_ENOENT);
  MESSAGE_HAS("/none': No such file");
  CHECK(pg_file_read(ctx, temporary_path("bytes/below"), 0, &data, &size) == PG_ENOENT);
  CHECK(pg_file_read(ctx, temporary_folder, 0, &data, &size) == PG_EFORMAT);
  MESSAGE_HAS("is a folder, not a file");
  CHECK(mkfifo(temporary_path("pipe"), 0600) == 0);
  CHECK(pg_file_read(ctx, temporary_path("pipe"), 0, &data, &size) == PG_EFORMAT,
        "a pipe is refused, not waited for");
  CHECK(pg_file_read(ctx, "/dev/zero", 0, &data, &size) == PG_EFORMAT);
}

TEST(positioned_reads) {
  const char *path = temporary_path("numbers");
  char data[8];
  put_file(path, "0123456789", 10);
  const int fd = open(path, O_RDONLY);
  CHECK(pg_file_pread(ctx, fd, path, 2, data, 8) == 0 && memcmp(data, "23456789", 8) == 0);
  CHECK(pg_file_pread(ctx, fd, path, 3, data, 8) == PG_EFORMAT);
  MESSAGE_HAS("is truncated: it ends at byte 10, before byte 11");
  CHECK(pg_file_pread(ctx, fd, path, 100, data, 1) == PG_EFORMAT);
  CHECK(pg_file_pread(ctx, fd, path, 100, data, 0) == 0);
  CHECK(pg_file_pread(ctx, fd, path, -1, data, 1) == PG_EIO);
  close(fd);
  CHECK(pg_file_pread(ctx, fd, path, 0, data, 1) == PG_EIO);
  MESSAGE_HAS("cannot read");
  /* Offsets past 2^32, in a file that takes no space. */
  const int sparse = open(temporary_path("sparse"), O_RDWR | O_CREAT, 0600);
  const int64_t far = ((int64_t)5 << 30) + 3;
  CHECK(pwrite(sparse, "far", 3, far) == 3);
  CHECK(pg_file_pread(ctx, sparse, "sparse", far, data, 3) == 0 && memcmp(data, "far", 3) == 0);
  close(sparse);
}

static void nothing(int number) {
  (void)number;
}

typedef struct pipe_reader {
  int fd;
  uint64_t sum, bytes;
} pipe_reader;
static void *drain(void *argument) {
  pipe_reader *r = argument;
  unsigned char data[777];
  ssize_t n;
  while ((n = read(r->fd, data, sizeof data)) > 0 || (n < 0 && errno == EINTR))
    for (ssize_t i = 0; i < n; i++) r->sum += data[i] * (r->bytes++ % 251 + 1);
  return NULL;
}

/* A pipe takes a little at a time, and a timer interrupts without SA_RESTART: every write is short
 * or interrupted many times. */
TEST(writes_are_completed) {
  const size_t size = 8 << 20;
  unsigned char *data = malloc(size);
  uint64_t want = 0;
  for (size_t i = 0; i < size; i++) {
    data[i] = (unsigned char)(i * 2654435761u >> 13);
    want += data[i] * (i % 251 + 1);
  }
  int ends[2];
  struct sigaction action = {.sa_handler = nothing}, old;
  const struct itimerval often = {{0, 200}, {0, 200}}, off = {{0, 0}, {0, 0}};
  CHECK(pipe(ends) == 0);
  pipe_reader reader = {.fd = ends[0]};
  pthread_t thread;
  sigset_t alarm_only;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  sigaction(SIGALRM, &action, &old);
  pthread_sigmask(SIG_BLOCK, &alarm_only, NULL); /* the reader inherits: signals come here */
  pthread_create(&thread, NULL, drain, &reader);
  pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
  setitimer(ITIMER_REAL, &often, NULL);
  CHECK(pg_file_write_all(ctx, ends[1], "pipe", data, size) == 0, "%s", pg_context_message(ctx));
  setitimer(ITIMER_REAL, &off, NULL);
  close(ends[1]);
  pthread_join(thread, NULL);
  sigaction(SIGALRM, &old, NULL);
  CHECK(reader.bytes == size && reader.sum == want, "%llu bytes arrived",
        (unsigned long long)reader.bytes);
  close(ends[0]);
  free(data);
}

TEST(a_full_device_is_no_space) {
  const int fd = open("/dev/full", O_WRONLY);
  CHECK(pg_file_write_all(ctx, fd, "/dev/full", "x", 1) == PG_ENOSPC);
  MESSAGE_HAS("'/dev/full': No space left");
  close(fd);
}

/* Files in the folder, "." and ".." excluded. */
static int count_files(void) {
  char command[256];
  int n = -1;
  snprintf(command, sizeof command, "ls -A %s/atomic | wc -l", temporary_folder);
  FILE *f = popen(command, "r");
  if (!f || fscanf(f, "%d", &n) != 1) n = -1;
  if (f) pclose(f);
  return n;
}

TEST(atomic_writes) {
  mkdir(temporary_path("atomic"), 0700);
  const char *path = temporary_path("atomic/file");
  size_t size;
  CHECK(pg_file_write_atomic(ctx, path, "first", 5) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_file_write_atomic(ctx, path, "second", 6) == 0);
  char *text = get_file(path, &size);
  CHECK(size == 6 && strcmp(text, "second") == 0 && count_files() == 1);
  free(text);
  /* A write that runs into a limit leaves the old file and nothing else. */
  struct rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  small.rlim_cur = 100;
  char *large = calloc(1, 1000);
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const int status = pg_file_write_atomic(ctx, path, large, 1000);
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_DFL);
  CHECK(status == PG_ENOSPC, "%d: %s", status, pg_context_message(ctx));
  text = get_file(path, &size);
  CHECK(size == 6 && strcmp(text, "second") == 0 && count_files() == 1, "%d files", count_files());
  free(text);
  free(large);
  CHECK(pg_file_write_atomic(ctx, temporary_path("nowhere/file"), "x", 1) == PG_ENOENT);
  mkdir(temporary_path("atomic/folder"), 0700);
  CHECK(pg_file_write_atomic(ctx, temporary_path("atomic/folder"), "x", 1) < 0);
  CHECK(count_files() == 2, "%d files", count_files());
  /* A name without a folder is in the working directory. */
  char *cwd = getcwd(NULL, 0);
  CHECK(chdir(temporary_path("atomic")) == 0 && pg_file_write_atomic(ctx, "bare", "x", 1) == 0);
  CHECK(exists("bare") && chdir(cwd) == 0);
  free(cwd);
  CHECK(pg_file_sync(ctx, path) == 0 && pg_file_sync(ctx, temporary_folder) == 0);
  CHECK(pg_file_sync(ctx, temporary_path("none")) == PG_ENOENT);
}

TEST(folders) {
  CHECK(pg_file_make_folders(ctx, temporary_path("a/b//c/")) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_file_make_folders(ctx, temporary_path("a/b/c")) == 0, "again");
  CHECK(exists(temporary_path("a/b/c")));
  put_file(temporary_path("a/file"), "x", 1);
  CHECK(pg_file_make_folders(ctx, temporary_path("a/file")) == PG_EEXIST);
  MESSAGE_HAS("is not a folder");
  CHECK(pg_file_make_folders(ctx, temporary_path("a/file/below")) < 0);
  CHECK(pg_file_make_folders(ctx, "/") == 0 && pg_file_make_folders(ctx, ".") == 0);
}

TEST(removal_does_not_follow_links) {
  CHECK(pg_file_make_folders(ctx, temporary_path("outside")) == 0);
  put_file(temporary_path("outside/precious"), "x", 1);
  CHECK(pg_file_make_folders(ctx, temporary_path("tree/one/two")) == 0);
  put_file(temporary_path("tree/one/two/file"), "x", 1);
  CHECK(symlink(temporary_path("outside"), temporary_path("tree/link")) == 0);
  CHECK(symlink(temporary_path("outside/precious"), temporary_path("tree/one/link")) == 0);
  CHECK(symlink("nowhere", temporary_path("tree/dangling")) == 0);
  CHECK(pg_file_remove_tree(ctx, temporary_path("tree")) == 0, "%s", pg_context_message(ctx));
  CHECK(!exists(temporary_path("tree")));
  CHECK(exists(temporary_path("outside/precious")), "a link was followed");
  CHECK(pg_file_remove_tree(ctx, temporary_path("tree")) == 0, "a missing one is fine");
  CHECK(symlink(temporary_path("outside"), temporary_path("link")) == 0);
  CHECK(pg_file_remove_tree(ctx, temporary_path("link")) == 0);
  CHECK(!exists(temporary_path("link")) && exists(temporary_path("outside/precious")));
  CHECK(pg_file_remove_tree(ctx, temporary_path("outside/precious")) == 0, "a single file");
  CHECK(!exists(temporary_path("outside/precious")) && exists(temporary_path("outside")));
}

TEST(space) {
  CHECK(pg_file_require_space(ctx, temporary_folder, 0) == 0);
  CHECK(pg_file_require_space(ctx, temporary_folder, 1) == 0);
  CHECK(pg_file_require_space(ctx, temporary_folder, INT64_MAX) == PG_ENOSPC);
  MESSAGE_HAS("needs 9223372036854775807 bytes");
  CHECK(pg_file_require_space(ctx, temporary_path("not/yet/there"), 1) == 0, "%s",
        pg_context_message(ctx));
  CHECK(pg_file_require_space(ctx, "relative/not/there", 1) == 0, "%s", pg_context_message(ctx));
}

TEST(sha256) {
  /* FIPS 180-4 examples and the empty message. */
  char hex[65], other[65];
  pg_sha256("abc", 3, hex);
  CHECK(strcmp(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad") == 0);
  pg_sha256("", 0, hex);
  CHECK(strcmp(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855") == 0);
  /* A million times "a": spans the streamed file's buffer unevenly. */
  const size_t n = 1000000, sizes[] = {0, 1, 1 << 20, (1 << 20) + 1, 3 << 20};
  char *data = malloc(4 << 20);
  memset(data, 'a', n);
  put_file(temporary_path("hashed"), data, n);
  CHECK(pg_file_sha256(ctx, temporary_path("hashed"), hex) == 0);
  CHECK(strcmp(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0") == 0);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    for (size_t k = 0; k < sizes[i]; k++) data[k] = (char)(k * 7 + k / 1000);
    put_file(temporary_path("hashed"), data, sizes[i]);
    pg_sha256(data, sizes[i], other);
    CHECK(pg_file_sha256(ctx, temporary_path("hashed"), hex) == 0 && strcmp(hex, other) == 0,
          "%zu bytes", sizes[i]);
  }
  free(data);
  CHECK(pg_file_sha256(ctx, temporary_path("none"), hex) == PG_ENOENT);
}

int main(void) {
  const pg_context_options options = {.threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(read_whole_files);
  RUN(positioned_reads);
  RUN(writes_are_completed);
  RUN(a_full_device_is_no_space);
  RUN(atomic_writes);
  RUN(folders);
  RUN(removal_does_not_follow_links);
  RUN(space);
  RUN(sha256);
  if (pg_file_remove_tree(ctx, temporary_folder) < 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
