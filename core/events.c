/* TensorBoard's event files: TFRecords (length, masked CRC-32C of it, data, masked CRC-32C of that,
 * little-endian) of protocol buffer messages (events.proto). */
#include "events.h"
#include "events.pb-c.h"
#include "files.h"
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 30, STRINGS = 7, START = 1 };

/* One value of a step with all that its message points to. */
typedef struct entry {
  Pg__Board__Value value;
  Pg__Board__Metadata metadata;
  Pg__Board__Plugin plugin;
  Pg__Board__Histogram histogram;
  Pg__Board__Text text;
  Pg__Board__Shape shape;
  ProtobufCBinaryData string;
  double limits[BUCKETS], counts[BUCKETS];
  struct entry *next;
} entry;

struct pg_events {
  pg_context *context;
  char *path;
  int fd;
  int64_t end;  /* of the last whole record */
  entry *first; /* the step's values, in order */
  entry **last;
  size_t count;
};

/* CRC-32C (Castagnoli), reflected polynomial, masked as TFRecords want it. */
static uint32_t masked_crc(const uint8_t *data, size_t size) {
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < size; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82f63b78u & -(crc & 1));
  }
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

static void put_little(uint8_t *to, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> (8 * i));
}

static int out_of_memory(pg_events *e) {
  return pg_fail(e->context, PG_ENOMEM, "a record of '%s' does not fit in memory", e->path);
}

static int write_event(pg_events *e, Pg__Board__Event *event) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  event->wall_time = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  const size_t size = pg__board__event__get_packed_size(event), all = size + 16;
  uint8_t *record = malloc(all);
  if (!record) return out_of_memory(e);
  put_little(record, size, 8);
  put_little(record + 8, masked_crc(record, 8), 4);
  pg__board__event__pack(event, record + 12);
  put_little(record + 12 + size, masked_crc(record + 12, size), 4);
  int status = pg_file_write_all(e->context, e->fd, e->path, record, all);
  free(record);
  if (status == 0)
    e->end += (int64_t)all;
  else if (ftruncate(e->fd, e->end) < 0)
    status = pg__fail_errno(e->context, "cut a torn record of", e->path, errno);
  return status;
}

/* A file that did not exist, later in the order of names than those of earlier seconds. */
static int create(pg_events *e, const char *folder) {
  char host[256] = "";
  const size_t room = strlen(folder) + sizeof host + 96;
  if (gethostname(host, sizeof host - 1) < 0 || !host[0]) strcpy(host, "host");
  if (!(e->path = malloc(room)))
    return pg_fail(e->context, PG_ENOMEM, "a path in '%s' does not fit in memory", folder);
  for (int n = 0;; n++) {
    snprintf(e->path, room, "%s/events.out.tfevents.%010lld.%s.%d.%d", folder,
             (long long)time(NULL), host, (int)getpid(), n);
    if (access(e->path, F_OK) != 0) break;
  }
  return pg__open(e->context, e->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, &e->fd);
}

int pg_events_open(pg_context *ctx, const char *folder, int64_t step, pg_events **out) {
  int status;
  Pg__Board__Event event = PG__BOARD__EVENT__INIT;
  Pg__Board__Session session = PG__BOARD__SESSION__INIT;
  pg_events *e = calloc(1, sizeof *e);
  *out = NULL;
  if (!e) return pg_fail(ctx, PG_ENOMEM, "event files of '%s' do not fit in memory", folder);
  e->context = ctx;
  e->fd = -1;
  e->last = &e->first;
  PG_TRY(create(e, folder));
  event.what_case = PG__BOARD__EVENT__WHAT_FILE_VERSION;
  event.file_version = "brain.Event:2";
  PG_TRY(write_event(e, &event));
  event.what_case = PG__BOARD__EVENT__WHAT_SESSION;
  event.step = step;
  event.session = &session;
  session.status = START;
  PG_TRY(write_event(e, &event));
  *out = e;
  return 0;
fail:
  pg_events_close(e);
  return status;
}

static void drop_values(pg_events *e) {
  while (e->first) {
    entry *v = e->first;
    e->first = v->next;
    free(v->value.tag);
    free(v->string.data);
    free(v);
  }
  e->last = &e->first;
  e->count = 0;
}

void pg_events_close(pg_events *e) {
  if (!e) return;
  drop_values(e);
  if (e->fd >= 0) close(e->fd);
  free(e->path);
  free(e);
}

const char *pg_events_path(const pg_events *e) {
  return e->path;
}

static entry *add(pg_events *e, const char *tag) {
  entry *v = calloc(1, sizeof *v);
  if (!v) return NULL;
  pg__board__value__init(&v->value);
  if (!(v->value.tag = strdup(tag))) {
    free(v);
    return NULL;
  }
  *e->last = v;
  e->last = &v->next;
  e->count++;
  return v;
}

int pg_events_scalar(pg_events *e, const char *tag, double value) {
  entry *v = add(e, tag);
  if (!v) return out_of_memory(e);
  v->value.what_case = PG__BOARD__VALUE__WHAT_SCALAR;
  v->value.scalar = (float)value;
  return 0;
}

int pg_events_text(pg_events *e, const char *tag, const char *text) {
  uint8_t *copy = (uint8_t *)strdup(text);
  entry *v = copy ? add(e, tag) : NULL;
  if (!v) {
    free(copy);
    return out_of_memory(e);
  }
  pg__board__metadata__init(&v->metadata);
  pg__board__plugin__init(&v->plugin);
  pg__board__text__init(&v->text);
  pg__board__shape__init(&v->shape);
  v->plugin.name = "text";
  v->metadata.plugin = &v->plugin;
  v->value.metadata = &v->metadata;
  v->string.data = copy;
  v->string.len = strlen(text);
  v->text.dtype = STRINGS;
  v->text.shape = &v->shape;
  v->text.n_text = 1;
  v->text.text = &v->string;
  v->value.what_case = PG__BOARD__VALUE__WHAT_TEXT;
  v->value.text = &v->text;
  return 0;
}

int pg_events_histogram(pg_events *e, const char *tag, const double *values, int64_t count) {
  Pg__Board__Histogram h = PG__BOARD__HISTOGRAM__INIT;
  h.min = INFINITY;
  h.max = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    if (!isfinite(values[i])) continue;
    h.num += 1;
    h.sum += values[i];
    h.sum_squares += values[i] * values[i];
    if (values[i] < h.min) h.min = values[i];
    if (values[i] > h.max) h.max = values[i];
  }
  if (h.num == 0) return 0;
  entry *v = add(e, tag);
  if (!v) return out_of_memory(e);
  /* Halves first: the difference of two finite values may overflow. */
  const double half = h.max / 2 - h.min / 2;
  for (int i = 0; i < BUCKETS; i++) {
    const double part = (double)(i + 1) / BUCKETS;
    v->limits[i] = i + 1 < BUCKETS ? h.min + 2 * part * half : h.max;
  }
  for (int64_t i = 0; i < count; i++) {
    if (!isfinite(values[i])) continue;
    int k = 0;
    while (k + 1 < BUCKETS && values[i] > v->limits[k]) k++;
    v->counts[k] += 1;
  }
  h.bucket_limit = v->limits;
  h.bucket = v->counts;
  h.n_bucket_limit = h.n_bucket = BUCKETS;
  v->histogram = h;
  v->value.what_case = PG__BOARD__VALUE__WHAT_HISTOGRAM;
  v->value.histogram = &v->histogram;
  return 0;
}

int pg_events_flush(pg_events *e, int64_t step) {
  if (e->count == 0) return 0;
  int status = 0;
  size_t n = 0;
  Pg__Board__Event event = PG__BOARD__EVENT__INIT;
  Pg__Board__Summary summary = PG__BOARD__SUMMARY__INIT;
  summary.value = malloc(e->count * sizeof *summary.value);
  if (!summary.value) {
    status = out_of_memory(e);
    goto fail;
  }
  for (entry *v = e->first; v; v = v->next) summary.value[n++] = &v->value;
  summary.n_value = n;
  event.step = step;
  event.what_case = PG__BOARD__EVENT__WHAT_SUMMARY;
  event.summary = &summary;
  status = write_event(e, &event);
fail:
  free(summary.value);
  drop_values(e);
  return status;
}
