/* metrics.jsonl: whole lines or none, strict JSON whatever is logged and whatever the locale. */
#include "core/files.h"
#include "core/metrics.h"
#include "temporary.h"
#include "unit.h"

#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static pg_context *ctx;

static pg_metrics *open_metrics(const char *path) {
  pg_metrics *m;
  CHECK(pg_metrics_open(ctx, path, &m) == 0, "%s", pg_context_message(ctx));
  return m;
}

static void check_file(const char *path, const char *want) {
  size_t size;
  char *text = get_file(path, &size);
  CHECK(text && strcmp(text, want) == 0, "%s, want %s", text, want);
  free(text);
}

TEST(lines) {
  const char *path = temporary_path("metrics.jsonl");
  pg_metrics *m = open_metrics(path);
  CHECK(pg_metrics_flush(m) == 0);
  check_file(path, "");
  CHECK(pg_metrics_integer(m, "progress/update", 10) == 0);
  CHECK(pg_metrics_real(m, "train/loss", 0.1) == 0);
  CHECK(pg_metrics_real(m, "train/grad_norm", 2) == 0);
  CHECK(pg_metrics_string(m, "note", "a \"quoted\" line\n", 16) == 0);
  CHECK(pg_metrics_json(m, "pair", " [3,\n 5] ") == 0);
  CHECK(pg_metrics_real(m, "train/loss", 1e-10) == 0, "a repeated name keeps its place");
  CHECK(pg_metrics_flush(m) == 0);
  static const char first[] =
      "{\"progress/update\": 10, \"train/loss\": 1e-10, \"train/grad_norm\": 2.0, "
      "\"note\": \"a \\\"quoted\\\" line\\n\", \"pair\": [3, 5]}\n";
  check_file(path, first); /* flushed: seen before the file is closed */
  CHECK(pg_metrics_flush(m) == 0);
  check_file(path, first);
  pg_metrics_close(m);
  m = open_metrics(path);
  CHECK(pg_metrics_integer(m, "progress/update", INT64_MIN) == 0 && pg_metrics_flush(m) == 0);
  pg_metrics_close(m);
  char both[400];
  snprintf(both, sizeof both, "%s{\"progress/update\": -9223372036854775808}\n", first);
  check_file(path, both);
  pg_metrics_close(NULL);
}

TEST(non_finite_values) {
  const char *path = temporary_path("nonfinite.jsonl");
  pg_metrics *m = open_metrics(path);
  CHECK(pg_metrics_real(m, "a", NAN) == 0 && pg_metrics_real(m, "b", 1) == 0);
  CHECK(pg_metrics_real(m, "c", -INFINITY) == 0 && pg_metrics_real(m, "d", INFINITY) == 0);
  CHECK(pg_metrics_real(m, "d", 2) == 0, "a finite value takes its place");
  CHECK(pg_metrics_real(m, "b", INFINITY) == 0);
  CHECK(pg_metrics_flush(m) == 0);
  CHECK(pg_metrics_real(m, "a", 3) == 0 && pg_metrics_flush(m) == 0, "the next line starts afresh");
  CHECK(pg_metrics_real(m, "nonfinite", 3) == PG_EINVAL);
  CHECK(strstr(pg_context_message(ctx), "reserved"), "%s", pg_context_message(ctx));
  CHECK(pg_metrics_flush(m) == 0);
  pg_metrics_close(m);
  check_file(path, "{\"a\": null, \"b\": null, \"c\": null, \"d\": 2.0, \"nonfinite\": [\"a\", "
                   "\"c\", \"b\"]}\n{\"a\": 3.0}\n");
}

TEST(refused_values) {
  const char *path = temporary_path("refused.jsonl");
  pg_metrics *m = open_metrics(path);
  CHECK(pg_metrics_json(m, "x", "[1, NaN]") == PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "metric \"x\", line 1"), "%s", pg_context_message(ctx));
  CHECK(pg_metrics_json(m, "x", "1} {") == PG_EFORMAT);
  CHECK(pg_metrics_json(m, "x", "{\"a\":1,\"a\":2}") == PG_EFORMAT);
  CHECK(pg_metrics_string(m, "x", "\xff", 1) == PG_EINVAL);
  CHECK(pg_metrics_real(m, "\xff", 1) == PG_EINVAL);
  CHECK(pg_metrics_flush(m) == 0);
  check_file(path, "");
  CHECK(pg_metrics_real(m, "\u20ac", 1) == 0 && pg_metrics_flush(m) == 0);
  pg_metrics_close(m);
  check_file(path, "{\"\u20ac\": 1.0}\n");
  CHECK(pg_metrics_open(ctx, temporary_path("none/x"), &m) == PG_ENOENT && !m);
  CHECK(pg_metrics_open(ctx, temporary_folder, &m) < 0 && !m);
}

TEST(torn_tails_are_cut) {
  const char *path = temporary_path("torn.jsonl");
  static char big[9000];
  memset(big, 'x', sizeof big);
  big[3999] = '\n';
  static const struct {
    const char *text;
    size_t size, kept;
  } cases[] = {
      {"", 0, 0},
      {"{\"a\": 1}\n", 9, 9},
      {"{\"a\": 1}\n{\"a\": 2", 16, 9},
      {"{\"a\": 1", 7, 0},
      {"\n", 1, 1},
      {"{}\n\0\0\0", 6, 3},    /* a file system may leave zeros after a crash */
      {big, sizeof big, 4000}, /* the newline lies blocks before the end */
      {big, 4000, 4000},
      {big, 3999, 0},
      {big + 4000, 5000, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    put_file(path, cases[i].text, cases[i].size);
    pg_metrics *m = open_metrics(path);
    CHECK(pg_metrics_integer(m, "b", 3) == 0 && pg_metrics_flush(m) == 0);
    pg_metrics_close(m);
    size_t size;
    char *text = get_file(path, &size);
    CHECK(size == cases[i].kept + 9, "case %zu: %zu bytes", i, size);
    CHECK(memcmp(text, cases[i].text, cases[i].kept) == 0, "case %zu", i);
    CHECK(strcmp(text + cases[i].kept, "{\"b\": 3}\n") == 0, "case %zu", i);
    free(text);
  }
}

TEST(a_full_disk_leaves_whole_lines) {
  pg_metrics *m = open_metrics("/dev/full");
  CHECK(pg_metrics_integer(m, "a", 1) == 0 && pg_metrics_flush(m) == PG_ENOSPC);
  pg_metrics_close(m);
  /* A size limit cuts the write of a line in the middle. */
  const char *path = temporary_path("limited.jsonl");
  struct rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  m = open_metrics(path);
  signal(SIGXFSZ, SIG_IGN);
  int written = 0, failed = 0, i;
  for (i = 0; i < 40; i++) {
    small.rlim_cur = i < 20 ? 100 : 150; /* some room appears again */
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK(pg_metrics_integer(m, "line", 100 + i) == 0);
    const int status = pg_metrics_flush(m);
    CHECK(status == 0 || status == PG_ENOSPC, "%s", pg_context_message(ctx));
    if (status == 0)
      written++;
    else
      failed++;
    setrlimit(RLIMIT_FSIZE, &before);
    size_t size;
    char *text = get_file(path, &size);
    CHECK(size == 0 || text[size - 1] == '\n', "a torn line after line %d", i);
    CHECK(size == (size_t)written * 14, "%zu bytes, %d lines", size, written);
    free(text);
  }
  signal(SIGXFSZ, SIG_DFL);
  pg_metrics_close(m);
  CHECK(written == 150 / 14 && failed == 40 - written, "%d lines written, %d failed", written,
        failed);
}

TEST(a_kill_while_writing_loses_at_most_a_line) {
  const char *path = temporary_path("killed.jsonl");
  for (int round = 0; round < 5; round++) {
    const pid_t child = fork();
    if (child == 0) {
      pg_metrics *m;
      if (pg_metrics_open(ctx, path, &m) < 0) _exit(1);
      for (int64_t i = 0;; i++)
        if (pg_metrics_integer(m, "update", i) < 0 || pg_metrics_flush(m) < 0) _exit(1);
    }
    usleep(20000);
    kill(child, SIGKILL);
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status), "the writer failed by itself");
    pg_metrics *m = open_metrics(path);
    CHECK(pg_metrics_string(m, "session", "resumed", 7) == 0 && pg_metrics_flush(m) == 0);
    pg_metrics_close(m);
  }
  FILE *f = fopen(path, "r");
  char line[200];
  int lines = 0, sessions = 0;
  while (f && fgets(line, sizeof line, f)) {
    json_t *value = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
    CHECK(value, "line %d is not JSON: %s", lines, line);
    sessions += json_object_get(value, "session") != NULL;
    json_decref(value);
    lines++;
  }
  if (f) fclose(f);
  CHECK(sessions == 5 && lines > 5, "%d sessions in %d lines", sessions, lines);
}

TEST(a_decimal_comma_changes_nothing) {
  const char *path = temporary_path("comma.jsonl");
  CHECK(comma_locale(), "no locale with a decimal comma could be had");
  pg_metrics *m = open_metrics(path);
  CHECK(pg_metrics_real(m, "a", 0.5) == 0 && pg_metrics_json(m, "b", "[1.25, 2]") == 0);
  CHECK(pg_metrics_flush(m) == 0);
  pg_metrics_close(m);
  setlocale(LC_NUMERIC, "C");
  check_file(path, "{\"a\": 0.5, \"b\": [1.25, 2]}\n");
}

int main(void) {
  const pg_context_options options = {.threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(lines);
  RUN(non_finite_values);
  RUN(refused_values);
  RUN(torn_tails_are_cut);
  RUN(a_full_disk_leaves_whole_lines);
  RUN(a_kill_while_writing_loses_at_most_a_line);
  RUN(a_decimal_comma_changes_nothing);
  if (pg_file_remove_tree(ctx, temporary_folder) < 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
