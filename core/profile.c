/* Recording of operations. An event takes two time stamps of the queue when it begins and ends;
 * they are turned into seconds when the recording stops. Spans are ranges of events. */
#include "profile.h"
#include "files.h"
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct event {
  const char *operation, *caller;
  pg_part part;
  int64_t begin, end; /* time stamps; end is -1 until it has ended */
  pg_cost cost;
} event;

/* Events [first, last) were called for `name`. */
typedef struct span {
  const char *name;
  int64_t number;
  pg_part part, outer_part;
  size_t first, last;
  int outer; /* the span around it, -1 */
} span;

struct pg_profile {
  /* while recording */
  event *recorded;
  size_t capacity;
  int64_t stamps;
  pg_part part; /* of operations that come now */
  bool lost;    /* memory ran out, or a time stamp failed: `failure` tells then */
  char failure[512];
  pg_cost ignored;
  /* both */
  size_t count; /* events */
  span *spans;
  size_t span_count, span_capacity;
  int span; /* the innermost open one, -1 */
  /* afterwards */
  double seconds;
  pg_profile_event *events;
  pg_profile_row *rows;
  size_t row_count;
  double parts[PG_PARTS];
};

const char *pg_part_name(pg_part part) {
  static const char *const names[PG_PARTS] = {
      [PG_PART_HEAD] = "head",
      [PG_PART_OPTIMIZER] = "optimizer",
      [PG_PART_COMMUNICATION] = "communication",
      [PG_PART_DATA_WAIT] = "data_wait",
      [PG_PART_ATTENTION] = "attention",
      [PG_PART_GEMM] = "gemm",
      [PG_PART_EMBEDDING] = "embedding",
      [PG_PART_ELEMENTWISE] = "elementwise",
      [PG_PART_REST] = "rest",
  };
  return (unsigned)part < PG_PARTS ? names[part] : "unknown";
}

/* What an operation is by its name. */
static pg_part part_of(const char *operation) {
  static const struct {
    const char *prefix;
    pg_part part;
  } known[] = {{"gemm", PG_PART_GEMM},           {"attention", PG_PART_ATTENTION},
               {"embedding", PG_PART_EMBEDDING}, {"upload", PG_PART_REST},
               {"download", PG_PART_REST},       {"zero", PG_PART_REST},
               {"synchronize", PG_PART_REST},    {"device_info", PG_PART_REST}};
  for (size_t i = 0; i < PG_COUNT(known); i++)
    if (!strncmp(operation, known[i].prefix, strlen(known[i].prefix))) return known[i].part;
  return PG_PART_ELEMENTWISE;
}

/* ---- recording --------------------------------------------------------------------------- */
/* Room for one more element of a growing array; false when there is no memory. */
static bool grow(void **array, size_t count, size_t *capacity, size_t size) {
  if (count < *capacity) return true;
  size_t wanted = *capacity ? 2 * *capacity : 256;
  void *more = realloc(*array, wanted * size);
  if (!more) return false;
  *array = more;
  *capacity = wanted;
  return true;
}

/* The number of a new time stamp, -1 on failure. */
static int64_t stamp(pg_context *ctx) {
  pg_profile *p = ctx->profile;
  if (p->lost) return -1;
  if (ctx->kernels->timestamp(ctx->queue, p->stamps) < 0) {
    p->lost = true;
    snprintf(p->failure, sizeof p->failure, "%s", ctx->kernels->message(ctx->queue));
    return -1;
  }
  return p->stamps++;
}

void pg__profile_begin(pg_context *ctx, pg_part part, const char *operation) {
  pg_profile *p = ctx->profile;
  if (!grow((void **)&p->recorded, p->count, &p->capacity, sizeof *p->recorded)) p->lost = true;
  if (p->lost) return;
  if (part == PG__PART_BY_OPERATION) part = p->part;
  if (part == PG__PART_BY_OPERATION) part = part_of(operation);
  p->recorded[p->count++] = (event){.operation = operation,
                                    .caller = p->span < 0 ? "" : p->spans[p->span].name,
                                    .part = part,
                                    .begin = stamp(ctx),
                                    .end = -1};
}

pg_cost *pg__profile_end(pg_context *ctx) {
  pg_profile *p = ctx->profile;
  if (p->lost || p->count == 0) return &p->ignored;
  event *e = &p->recorded[p->count - 1];
  e->end = stamp(ctx);
  return &e->cost;
}

int pg__profile_enter(pg_context *ctx, pg_part part, const char *name, int64_t number) {
  pg_profile *p = ctx->profile;
  if (!grow((void **)&p->spans, p->span_count, &p->span_capacity, sizeof *p->spans)) {
    p->lost = true;
    return -1;
  }
  p->spans[p->span_count] = (span){.name = name,
                                   .number = number,
                                   .part = part,
                                   .outer_part = p->part,
                                   .first = p->count,
                                   .outer = p->span};
  if (part != PG__PART_BY_OPERATION) p->part = part;
  return p->span = (int)p->span_count++;
}

void pg__profile_leave(pg_context *ctx, int at) {
  pg_profile *p = ctx->profile;
  if (at < 0 || (size_t)at >= p->span_count) return;
  span *s = &p->spans[at];
  s->last = p->count;
  p->span = s->outer;
  p->part = s->outer_part;
}

int pg_profile_start(pg_context *ctx) {
  pg_profile *p;
  int status;
  if (ctx->profile) return pg_fail(ctx, PG_ESTATE, "this context records a profile already");
  if (!(p = calloc(1, sizeof *p))) return pg_fail(ctx, PG_ENOMEM, "no memory for a profile");
  p->part = PG__PART_BY_OPERATION;
  p->span = -1;
  /* The first time stamp is the start; work queued before it does not count. */
  PG_TRY(pg__kernel_status(ctx, ctx->kernels->synchronize(ctx->queue), "synchronize"));
  ctx->profile = p;
  if (stamp(ctx) < 0) PG_TRY(pg__kernel_status(ctx, -1, "timestamp"));
  return 0;
fail:
  ctx->profile = NULL;
  pg_profile_free(p);
  return status;
}

/* ---- the result -------------------------------------------------------------------------- */
static int longest_first(const void *a, const void *b) {
  const pg_profile_row *x = a, *y = b;
  return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

/* Fill events, rows and parts from the seconds of the time stamps; false: no memory. */
static bool sum_up(pg_profile *p, const double *seconds) {
  size_t capacity = 0;
  p->events = calloc(p->count + 1, sizeof *p->events);
  if (!p->events) return false;
  for (size_t i = 0; i < p->count; i++) {
    const event *e = &p->recorded[i];
    const double begin = seconds[e->begin], end = e->end < 0 ? begin : seconds[e->end];
    p->events[i] = (pg_profile_event){.operation = e->operation,
                                      .caller = e->caller,
                                      .part = e->part,
                                      .begin = begin,
                                      .end = end,
                                      .bytes = e->cost.bytes,
                                      .flops = e->cost.flops};
    size_t r = 0;
    while (r < p->row_count &&
           (p->rows[r].part != e->part || strcmp(p->rows[r].operation, e->operation) != 0 ||
            strcmp(p->rows[r].caller, e->caller) != 0))
      r++;
    if (r == p->row_count) {
      if (!grow((void **)&p->rows, r, &capacity, sizeof *p->rows)) return false;
      p->rows[p->row_count++] =
          (pg_profile_row){.operation = e->operation, .caller = e->caller, .part = e->part};
    }
    p->rows[r].calls++;
    p->rows[r].seconds += end - begin;
    p->rows[r].bytes += e->cost.bytes;
    p->rows[r].flops += e->cost.flops;
    p->parts[e->part] += end - begin;
  }
  if (p->row_count) qsort(p->rows, p->row_count, sizeof *p->rows, longest_first);
  return true;
}

int pg_profile_stop(pg_context *ctx, pg_profile **out) {
  pg_profile *p = ctx->profile;
  double *seconds = NULL;
  int status;
  *out = NULL;
  if (!p) return pg_fail(ctx, PG_ESTATE, "this context records no profile");
  const int64_t last = stamp(ctx);
  ctx->profile = NULL;
  if (p->failure[0]) {
    status = pg_fail(ctx, PG_EDEVICE, "a time stamp of the profile failed: %s", p->failure);
    goto fail;
  }
  if (p->lost) goto memory;
  if (!(seconds = calloc((size_t)p->stamps, sizeof *seconds))) goto memory;
  PG_LAUNCH(ctx, elapsed, p->stamps, seconds);
  p->seconds = seconds[last];
  if (!sum_up(p, seconds)) goto memory;
  free(seconds);
  free(p->recorded);
  p->recorded = NULL;
  *out = p;
  return 0;
memory:
  status = pg_fail(ctx, PG_ENOMEM, "no memory for a profile of %zu operations", p->count);
fail:
  free(seconds);
  pg_profile_free(p);
  return status;
}

void pg_profile_free(pg_profile *p) {
  if (!p) return;
  free(p->recorded);
  free(p->spans);
  free(p->events);
  free(p->rows);
  free(p);
}

double pg_profile_seconds(const pg_profile *p) {
  return p->seconds;
}
double pg_profile_part_seconds(const pg_profile *p, pg_part part) {
  return (unsigned)part < PG_PARTS ? p->parts[part] : 0;
}
const pg_profile_event *pg_profile_events(const pg_profile *p, size_t *count) {
  *count = p->count;
  return p->events;
}
const pg_profile_row *pg_profile_rows(const pg_profile *p, size_t *count) {
  *count = p->row_count;
  return p->rows;
}

/* ---- the trace --------------------------------------------------------------------------- */
/* Microseconds with three decimals, whatever the locale's decimal point. */
static void write_microseconds(FILE *f, double seconds) {
  const int64_t ns = (int64_t)(1e9 * seconds + 0.5);
  fprintf(f, "%" PRId64 ".%03d", ns / 1000, (int)(ns % 1000));
}

/* The beginning of a complete event. Names are identifiers of this program: nothing to escape. */
static void write_complete(FILE *f, const char *name, const char *category, int track, double begin,
                           double end) {
  fprintf(f, ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"ts\":", name,
          category, track);
  write_microseconds(f, begin);
  fputs(",\"dur\":", f);
  write_microseconds(f, end - begin);
}

enum { SPANS = 1, OPERATIONS = 2 };

static void write_span(FILE *f, const pg_profile *p, const span *s) {
  char name[96];
  size_t first = s->first, last = s->last;
  if (first >= last) return;
  if (s->number < 0)
    snprintf(name, sizeof name, "%s", s->name);
  else
    snprintf(name, sizeof name, "%s %" PRId64, s->name, s->number);
  write_complete(f, name, "span", SPANS, p->events[first].begin, p->events[last - 1].end);
  fputs("}", f);
}

static void write_trace(FILE *f, const pg_profile *p) {
  static const char *const tracks[] = {[SPANS] = "update", [OPERATIONS] = "operations"};
  fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
        "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"perigee\"}}",
        f);
  for (int track = SPANS; track <= OPERATIONS; track++)
    fprintf(f,
            ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"args\":{\"name\":\"%"
            "s\"}}",
            track, tracks[track]);
  for (size_t i = 0; i < p->span_count; i++) write_span(f, p, &p->spans[i]);
  for (size_t i = 0; i < p->count; i++) {
    const pg_profile_event *e = &p->events[i];
    write_complete(f, e->operation, pg_part_name(e->part), OPERATIONS, e->begin, e->end);
    fprintf(f, ",\"args\":{\"bytes\":%.0f,\"flops\":%.0f}}", e->bytes, e->flops);
  }
  fputs("\n],\"otherData\":{\"microseconds\":", f);
  write_microseconds(f, p->seconds);
  fputs("}}\n", f);
}

int pg_profile_write(pg_context *ctx, const pg_profile *p, const char *path) {
  char *text = NULL;
  size_t size = 0;
  FILE *f = open_memstream(&text, &size);
  int status = 0;
  if (f) write_trace(f, p);
  if (!f || fclose(f) != 0 || !text)
    status = pg_fail(ctx, PG_ENOMEM, "no memory for a trace of %zu operations", p->count);
  else
    status = pg_file_write_atomic(ctx, path, text, size);
  free(text);
  return status;
}
