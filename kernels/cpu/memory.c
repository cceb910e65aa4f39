/* Host memory as device memory, and the queue. */
#include "cpu.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define PARALLEL_BYTES ((size_t)1 << 20)

int PG_CPU(queue_new)(const pg_queue_options *options, pg_queue **out, char *message, size_t size) {
  *out = NULL;
  if (options->device != 0) {
    snprintf(message, size, "there is one CPU device, index 0, not %d", options->device);
    return -1;
  }
  *out = calloc(1, sizeof **out);
  if (!*out) {
    snprintf(message, size, "no memory for a queue");
    return -1;
  }
  (*out)->threads = options->threads > 0 ? options->threads : omp_get_num_procs();
  return 0;
}

void PG_CPU(queue_free)(pg_queue *q) {
  if (!q) return;
  free(q->scratch);
  free(q->stamps);
  free(q);
}

/* NULL when there is no memory. Large buffers ask for huge pages, which is only advice: fewer page
 * faults and TLB misses. */
static void *take(size_t bytes) {
  const size_t unit = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 64;
  if (bytes > SIZE_MAX - unit) return NULL;
  void *memory = aligned_alloc(unit, bytes ? (bytes + unit - 1) / unit * unit : unit);
  if (memory && unit == HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

int PG_CPU(scratch)(pg_queue *q, int64_t floats) {
  size_t bytes = (size_t)(floats + 15) / 16 * 64 * (size_t)q->threads;
  if (bytes <= q->scratch_bytes) return 0;
  free(q->scratch);
  q->scratch_bytes = 0;
  q->scratch = take(bytes);
  if (!q->scratch) return pg_refuse(q, "no memory for %zu bytes of scratch", bytes);
  q->scratch_bytes = bytes;
  pg_note_held(q, 0);
  return 0;
}

int64_t PG_CPU(held)(pg_queue *q) {
  const size_t most = q->most_held;
  q->most_held = q->scratch_bytes;
  return (int64_t)most;
}

#define LEVEL_TEXT_(level) #level
#define LEVEL_TEXT(level) LEVEL_TEXT_(level)
int PG_CPU(device_info)(pg_queue *q, pg_device_info *out) {
  (void)q;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE), inner = sysconf(_SC_LEVEL2_CACHE_SIZE);
  *out = (pg_device_info){.name = "CPU, " LEVEL_TEXT(PG_CPU_LEVEL),
                          .count = 1,
                          .cache_bytes = cache > 0   ? cache
                                         : inner > 0 ? inner
                                                     : 0};
  return 0;
}

const char *PG_CPU(message)(const pg_queue *q) {
  return q->message;
}

int PG_CPU(alloc)(pg_queue *q, size_t bytes, void **out) {
  *out = take(bytes);
  return *out ? 0 : pg_refuse(q, "no memory for %zu bytes", bytes);
}

void PG_CPU(release)(pg_queue *q, void *memory) {
  (void)q;
  free(memory);
}

static void copy_bytes(pg_queue *q, void *to, const void *from, size_t bytes) {
  if (bytes < PARALLEL_BYTES) {
    if (bytes) memcpy(to, from, bytes);
    return;
  }
#pragma omp parallel num_threads(q->threads)
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part((int64_t)bytes, t, parts), end = pg_part((int64_t)bytes, t + 1, parts);
    memcpy((char *)to + begin, (const char *)from + begin, (size_t)(end - begin));
  }
}

int PG_CPU(upload)(pg_queue *q, void *device, const void *host, size_t bytes) {
  copy_bytes(q, device, host, bytes);
  return 0;
}

int PG_CPU(upload_beside)(pg_queue *q, void *device, const void *host, size_t bytes) {
  return PG_CPU(upload)(q, device, host, bytes);
}

int PG_CPU(join)(pg_queue *q) {
  (void)q;
  return 0;
}

int PG_CPU(download)(pg_queue *q, void *host, const void *device, size_t bytes) {
  copy_bytes(q, host, device, bytes);
  return 0;
}

int PG_CPU(copy)(pg_queue *q, void *to, const void *from, size_t bytes) {
  copy_bytes(q, to, from, bytes);
  return 0;
}

int PG_CPU(zero)(pg_queue *q, void *memory, size_t bytes) {
  if (bytes < PARALLEL_BYTES) {
    if (bytes) memset(memory, 0, bytes);
    return 0;
  }
#pragma omp parallel num_threads(q->threads)
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part((int64_t)bytes, t, parts), end = pg_part((int64_t)bytes, t + 1, parts);
    memset((char *)memory + begin, 0, (size_t)(end - begin));
  }
  return 0;
}

int PG_CPU(synchronize)(pg_queue *q) {
  (void)q;
  return 0;
}
