/* TensorBoard's event files: records that another reader of the format takes, whole or not at all.
 */
#include "core/events.h"
#include "core/files.h"
#include "temporary.h"
#include "unit.h"

#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

static pg_context *ctx;

/* CRC-32C by its definition: the remainder, modulo x^32 + ... (0x1edc6f41), of the bits, least
 * significant first, with the first 32 inverted; the result inverted and reflected. */
static uint32_t crc32c(const uint8_t *data, size_t size) {
  uint32_t rest = UINT32_MAX, reflected = 0;
  for (size_t i = 0; i < 8 * size; i++) {
    const uint32_t bit = (data[i / 8] >> (i % 8)) & 1, top = (rest >> 31) ^ bit;
    rest = (rest << 1) ^ (top ? 0x1edc6f41u : 0);
  }
  for (int i = 0; i < 32; i++) reflected |= ((rest >> i) & 1) << (31 - i);
  return ~reflected;
}

static uint64_t little(const uint8_t *p, int bytes) {
  uint64_t value = 0;
  for (int i = bytes; i-- > 0;) value = value << 8 | p[i];
  return value;
}

static int crc_matches(const uint8_t *data, size_t size, const uint8_t *stored) {
  const uint32_t crc = crc32c(data, size), turned = crc >> 15 | crc << 17;
  return (uint32_t)little(stored, 4) == turned + 0xa282ead8u;
}

/* Record `index` of a file's bytes; NULL when there are fewer. Fails on a torn or a wrong one. */
static const uint8_t *record(const char *file, size_t size, int index, size_t *length) {
  const uint8_t *p = (const uint8_t *)file, *end = p + size;
  while (p < end) {
    CHECK(end - p >= 16, "a torn record");
    *length = little(p, 8);
    CHECK(crc_matches(p, 8, p + 8), "the length's CRC");
    CHECK(*length <= (size_t)(end - p) - 16, "a torn record");
    CHECK(crc_matches(p + 12, *length, p + 12 + *length), "the data's CRC");
    if (index-- == 0) return p + 12;
    p += *length + 16;
  }
  return NULL;
}

static uint64_t varint(const uint8_t **p) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    value |= (uint64_t)(**p & 127) << shift;
    if (!(*(*p)++ & 128)) return value;
  }
}

/* The first field `number` of a message: where its bytes are, and how many; of an integer, its
 * value instead of the number. */
static const uint8_t *field(const uint8_t *p, size_t size, unsigned number, size_t *length) {
  const uint8_t *end = p + size;
  while (p < end) {
    const uint64_t key = varint(&p);
    size_t bytes = 0;
    switch (key & 7) {
    case 0: *length = varint(&p); break;
    case 1: *length = bytes = 8; break;
    case 2: *length = bytes = varint(&p); break;
    default: *length = bytes = 4;
    }
    if (key >> 3 == number) return p;
    p += bytes;
  }
  *length = 0;
  return NULL;
}

static double real64(const uint8_t *p) {
  double x;
  memcpy(&x, p, sizeof x);
  return x;
}

TEST(crc) {
  CHECK(crc32c((const uint8_t *)"123456789", 9) == 0xe3069283u, "the published check value");
}

TEST(records) {
  pg_events *e;
  size_t size, n, m;
  static const double norms[] = {1, 2, 2, 4, NAN};
  CHECK(pg_events_open(ctx, temporary_path("."), 7, &e) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_events_flush(e, 1) == 0, "nothing collected: nothing written");
  CHECK(pg_events_histogram(e, "norms", norms, 5) == 0);
  CHECK(pg_events_text(e, "recipe", "# text") == 0);
  CHECK(pg_events_histogram(e, "empty", norms + 4, 1) == 0);
  CHECK(pg_events_flush(e, 300) == 0, "%s", pg_context_message(ctx));
  char *file = get_file(pg_events_path(e), &size);
  const uint8_t *r = record(file, size, 0, &n);
  const uint8_t *version = field(r, n, 3, &m);
  CHECK(version && m == 13 && memcmp(version, "brain.Event:2", 13) == 0);
  r = record(file, size, 1, &n);
  CHECK(field(r, n, 2, &m) && m == 7, "the step of the start");
  r = field(r, n, 7, &n);
  CHECK(r && field(r, n, 1, &m) && m == 1, "a start");
  r = record(file, size, 2, &n);
  CHECK(field(r, n, 2, &m) && m == 300, "the step");
  const uint8_t *summary = field(r, n, 5, &n), *value = field(summary, n, 1, &m);
  size_t text_length, h_length;
  const uint8_t *after = value + m;
  CHECK(memcmp(field(value, m, 1, &h_length), "norms", 5) == 0);
  const uint8_t *h = field(value, m, 5, &h_length);
  static const double want[] = {1, 4, 4, 9, 25};
  for (unsigned i = 0; h && i < 5; i++)
    CHECK(real64(field(h, h_length, i + 1, &m)) == want[i], "field %u of the histogram", i + 1);
  double sum = 0;
  const uint8_t *counts = field(h, h_length, 7, &m);
  for (size_t i = 0; i < m / 8; i++) sum += real64(counts + 8 * i);
  CHECK(sum == 4 && m == 240 && real64(counts) == 1 && real64(counts + m - 8) == 1,
        "the least and the greatest are alone in the outer buckets");
  const uint8_t *limits = field(h, h_length, 6, &m);
  CHECK(m == 240 && real64(limits + m - 8) == 4, "the last edge is the greatest value");
  const uint8_t *text = field(after, n - (size_t)(after - summary), 1, &text_length);
  CHECK(text && memcmp(field(text, text_length, 1, &m), "recipe", 6) == 0);
  text = field(text, text_length, 8, &text_length);
  CHECK(text && memcmp(field(text, text_length, 8, &m), "# text", 6) == 0 && m == 6);
  CHECK(!record(file, size, 3, &n), "no fourth record");
  free(file);
  pg_events_close(e);
}

/* A file may not grow beyond `limit`: the record that does not fit leaves no trace. */
TEST(full) {
  pg_events *e;
  struct rlimit old, limit;
  size_t before, after;
  CHECK(pg_events_open(ctx, temporary_path("."), 0, &e) == 0, "%s", pg_context_message(ctx));
  free(get_file(pg_events_path(e), &before));
  getrlimit(RLIMIT_FSIZE, &old);
  limit = old;
  limit.rlim_cur = before + 10;
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
  CHECK(pg_events_scalar(e, "train/loss", 2.5) == 0);
  CHECK(pg_events_flush(e, 1) < 0, "no room");
  setrlimit(RLIMIT_FSIZE, &old);
  free(get_file(pg_events_path(e), &after));
  CHECK(after == before, "%zu bytes, %zu before", after, before);
  CHECK(pg_events_scalar(e, "train/loss", 1.5) == 0 && pg_events_flush(e, 2) == 0);
  char *file = get_file(pg_events_path(e), &after);
  size_t n, m;
  const uint8_t *r = record(file, after, 2, &n);
  CHECK(r && field(r, n, 2, &m) && m == 2, "the next record follows");
  free(file);
  pg_events_close(e);
  CHECK(pg_events_open(ctx, temporary_path("missing"), 0, &e) < 0 && !e);
}

int main(void) {
  const pg_context_options options = {.threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(crc);
  RUN(records);
  RUN(full);
  if (pg_file_remove_tree(ctx, temporary_folder) < 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
