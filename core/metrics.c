/* metrics.jsonl. A line is collected in memory as finished texts and written by one write(2), so a
 * reader sees whole lines; what a failed or killed write leaves is cut off. */
#include "metrics.h"
#include "files.h"
#include "internal.h"
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The line's key for the names of non-finite values. */
#define NONFINITE "nonfinite"

struct pg_metrics {
  pg_context *context;
  char *path;
  int fd;
  bool regular;  /* a device has no end to cut */
  int64_t end;   /* of the last whole line */
  json_t *line;  /* name -> value, in order of first appearance */
  json_t *names; /* of non-finite values: name -> true */
};

/* Cut the file back to its last newline and set m->end. */
static int cut_torn_tail(pg_metrics *m) {
  enum { BUFFER = 4096 };
  pg_context *ctx = m->context;
  char buffer[BUFFER];
  struct stat info;
  int status = 0;
  if (fstat(m->fd, &info) < 0) return pg__fail_errno(ctx, "examine", m->path, errno);
  m->regular = S_ISREG(info.st_mode);
  if (!m->regular) return 0;
  m->end = info.st_size;
  while (m->end > 0) {
    const int64_t from = m->end > BUFFER ? m->end - BUFFER : 0;
    const size_t n = (size_t)(m->end - from);
    PG_TRY(pg_file_pread(ctx, m->fd, m->path, from, buffer, n));
    const char *last = memrchr(buffer, '\n', n);
    m->end = last ? from + (last - buffer) + 1 : from;
    if (last) break;
  }
  if (m->end < info.st_size && ftruncate(m->fd, m->end) < 0)
    return pg__fail_errno(ctx, "cut the torn last line of", m->path, errno);
fail:
  return status;
}

static int out_of_memory(pg_metrics *m) {
  return pg_fail(m->context, PG_ENOMEM, "a line of '%s' does not fit in memory", m->path);
}

int pg_metrics_open(pg_context *ctx, const char *path, pg_metrics **out) {
  int status;
  pg_metrics *m = calloc(1, sizeof *m);
  *out = NULL;
  if (!m) return pg_fail(ctx, PG_ENOMEM, "'%s' does not fit in memory", path);
  m->context = ctx;
  m->fd = -1;
  m->path = strdup(path);
  m->line = json_object();
  m->names = json_object();
  if (!m->path || !m->line || !m->names) {
    status = pg_fail(ctx, PG_ENOMEM, "'%s' does not fit in memory", path);
    goto fail;
  }
  PG_TRY(pg__open(ctx, path, O_RDWR | O_CREAT | O_APPEND, &m->fd));
  PG_TRY(cut_torn_tail(m));
  *out = m;
  return 0;
fail:
  pg_metrics_close(m);
  return status;
}

void pg_metrics_close(pg_metrics *m) {
  if (!m) return;
  if (m->fd >= 0) close(m->fd);
  json_decref(m->line);
  json_decref(m->names);
  free(m->path);
  free(m);
}

/* Takes over `value`; NULL is what jansson gives for text that is not UTF-8, or no memory. */
static int set(pg_metrics *m, const char *name, json_t *value, bool finite) {
  if (strcmp(name, NONFINITE) == 0) {
    json_decref(value);
    return pg_fail(m->context, PG_EINVAL,
                   "the metric name \"" NONFINITE "\" is reserved for the list of such values");
  }
  if (!value || json_object_set_new(m->line, name, value) < 0)
    return pg_fail(m->context, PG_EINVAL, "metric \"%.200s\": its name or value is not UTF-8 text",
                   name);
  if (finite)
    json_object_del(m->names, name);
  else if (json_object_set_new(m->names, name, json_true()) < 0)
    return out_of_memory(m);
  return 0;
}

int pg_metrics_integer(pg_metrics *m, const char *name, int64_t value) {
  return set(m, name, json_integer(value), true);
}

int pg_metrics_real(pg_metrics *m, const char *name, double value) {
  const bool finite = isfinite(value);
  return set(m, name, finite ? json_real(value) : json_null(), finite);
}

int pg_metrics_string(pg_metrics *m, const char *name, const char *value, size_t size) {
  return set(m, name, json_stringn(value, size), true);
}

int pg_metrics_json(pg_metrics *m, const char *name, const char *json) {
  char what[256];
  json_t *value;
  snprintf(what, sizeof what, "metric \"%.200s\"", name);
  const int status = pg__json_parse_text(m->context, json, strlen(json), what, &value);
  return status < 0 ? status : set(m, name, value, true);
}

int pg_metrics_flush(pg_metrics *m) {
  int status = 0;
  char *text = NULL;
  json_t *list = NULL;
  const char *name;
  json_t *value;

  if (json_object_size(m->line) == 0) return 0;
  if (json_object_size(m->names) > 0) {
    list = json_array();
    json_object_foreach(m->names, name, value) {
      json_array_append_new(list, json_string(name));
    }
    if (json_object_set(m->line, NONFINITE, list) < 0) {
      status = out_of_memory(m);
      goto fail;
    }
  }
  text = pg__json_print(m->line, 0);
  const size_t length = text ? strlen(text) : 0;
  if (!text) {
    status = out_of_memory(m);
    goto fail;
  }
  text[length] = '\n'; /* takes the place of the NUL */
  status = pg_file_write_all(m->context, m->fd, m->path, text, length + 1);
  /* The line is dropped in either case: after a failure the next report starts afresh. */
  json_object_clear(m->line);
  json_object_clear(m->names);
  if (status == 0)
    m->end += (int64_t)length + 1;
  else if (m->regular && ftruncate(m->fd, m->end) < 0)
    status = pg__fail_errno(m->context, "cut a torn line of", m->path, errno);
fail:
  json_object_del(m->line, NONFINITE);
  json_decref(list);
  free(text);
  return status;
}
