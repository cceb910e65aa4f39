/* Device memory and copies.
 *
 * Memory that is released goes to a free list of its size and from there to the next that asks:
 * after the first update nothing is allocated any more, and since all work is on one stream, a
 * buffer may change hands while earlier work on it is still queued. The driver gets memory back
 * with the queue, or when an allocation would fail otherwise.
 *
 * Copies between host and device pass through rings of pinned slots, so that an upload returns once
 * the bytes are in a ring. Uploads beside the queue's work have a stream and a ring of their own: a
 * slot of theirs is still read when the queue's stream has moved on. */
#include "cuda.cuh"

#include <map>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Slots small enough that a batch wastes little of one, and so many that a dozen micro-batches are
 * on their way before the host has to wait. */
static constexpr int SLOTS = 16, SLOTS_BESIDE = 32;
static constexpr size_t SLOT_BYTES = (size_t)2 << 20, SLOT_BYTES_BESIDE = (size_t)256 << 10;

struct ring {
  int slots;
  size_t slot_bytes;
  char *memory;                   /* pinned; NULL until it is needed */
  cudaEvent_t done[SLOTS_BESIDE]; /* when the slot may be used again */
  int next;
  char *slot(int i) const { return memory + (size_t)i * slot_bytes; }
};

struct block {
  void *memory;
  size_t bytes;
  bool used, own; /* own: taken by the backend itself */
  block *next;    /* in the free list of its size */
};

struct pg_cuda_memory {
  std::map<void *, block> blocks;
  std::map<size_t, block *> lists; /* by bytes; made with the first block of a size */
  size_t cached;                   /* bytes in the lists */
  size_t held, most_held;          /* bytes of `own` blocks in use; since the last pg_cuda_held */
  void *scratch;
  size_t scratch_bytes;
  ring main, beside;
  cudaStream_t stream;         /* of uploads beside; NULL until the first */
  cudaEvent_t joined, arrived; /* on the queue's stream, at the last join; on the other */
  bool after_join, to_join;    /* the next upload waits for `joined`; the next join for `arrived` */
};

int pg__cuda_memory_new(pg_queue *q) {
  q->memory = new (std::nothrow) pg_cuda_memory();
  if (!q->memory) return pg_cuda_refuse(q, "no host memory for a queue");
  q->memory->main.slots = SLOTS, q->memory->main.slot_bytes = SLOT_BYTES;
  q->memory->beside.slots = SLOTS_BESIDE, q->memory->beside.slot_bytes = SLOT_BYTES_BESIDE;
  return 0;
}

static void free_ring(ring *r) {
  for (cudaEvent_t event : r->done)
    if (event) cudaEventDestroy(event);
  if (r->memory) cudaFreeHost(r->memory);
}

void pg__cuda_memory_free(pg_queue *q) {
  pg_cuda_memory *m = q->memory;
  if (!m) return;
  if (m->stream) cudaStreamSynchronize(m->stream);
  for (auto &entry : m->blocks) cudaFree(entry.second.memory);
  free_ring(&m->main);
  free_ring(&m->beside);
  for (cudaEvent_t event : {m->joined, m->arrived})
    if (event) cudaEventDestroy(event);
  if (m->stream) cudaStreamDestroy(m->stream);
  delete m;
  q->memory = NULL;
}

/* ---- allocation ---------------------------------------------------------------------------- */
#ifdef PG_CUDAEMU
/* Exact sizes let the emulation see the first byte past the end, and with a guard or the address
 * sanitizer released memory is unmapped. */
size_t pg_cuda_size_class(size_t bytes) {
  return bytes ? bytes : 1;
}
static bool cache_released() {
#if defined(__SANITIZE_ADDRESS__)
  return false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
  return false;
#endif
#endif
  const char *guard = getenv("CUDAEMU_GUARD");
  return !guard || strcmp(guard, "0") == 0;
}
#else
/* A quarter of a power of two, at least 512 bytes; from 8 MiB on multiples of 2 MiB. At most a
 * quarter is wasted. */
size_t pg_cuda_size_class(size_t bytes) {
  size_t unit = 512;
  if (bytes > SIZE_MAX / 2) return bytes; /* fails in the driver */
  if (bytes >= (size_t)8 << 20)
    unit = (size_t)2 << 20;
  else
    while (unit * 8 < bytes) unit *= 2;
  return bytes ? (bytes + unit - 1) / unit * unit : unit;
}
static bool cache_released() {
  return true;
}
#endif

/* Gives all cached memory back to the driver, which waits for the device. */
static void trim(pg_cuda_memory *m) {
  for (auto at = m->blocks.begin(); at != m->blocks.end();) {
    if (at->second.used) {
      ++at;
      continue;
    }
    cudaFree(at->second.memory);
    at = m->blocks.erase(at);
  }
  for (auto &list : m->lists) list.second = NULL;
  m->cached = 0;
}

static int no_memory(pg_queue *q, size_t bytes) {
  const double gib = 1024.0 * 1024 * 1024;
  size_t available = 0, total = 0;
  cudaMemGetInfo(&available, &total);
  cudaGetLastError();
  return pg_cuda_refuse(q, "no memory for %zu bytes (%.3f GiB): %.3f of %.3f GiB are free", bytes,
                        (double)bytes / gib, (double)available / gib, (double)total / gib);
}

int pg_cuda_alloc(pg_queue *q, size_t bytes, void **out) {
  pg_cuda_memory *m = q->memory;
  const size_t size = pg_cuda_size_class(bytes);
  cudaError_t error;
  *out = NULL;
  try {
    block *&list = m->lists[size];
    if (list) {
      block *b = list;
      list = b->next;
      b->used = true;
      m->cached -= size;
      *out = b->memory;
      return 0;
    }
    pg_cuda_enter(q);
    error = cudaMalloc(out, size);
    if (error == cudaErrorMemoryAllocation && m->cached) {
      cudaGetLastError();
      trim(m);
      error = cudaMalloc(out, size);
    }
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return no_memory(q, bytes);
    }
    if (error != cudaSuccess) return pg_cuda_fail(q, "cudaMalloc", error) - 1;
    m->blocks[*out] = {*out, size, true, false, NULL};
  } catch (const std::bad_alloc &) {
    if (*out) cudaFree(*out);
    *out = NULL;
    return pg_cuda_refuse(q, "no host memory for a list of %zu buffers", m->blocks.size());
  }
  return 0;
}

void pg_cuda_release(pg_queue *q, void *memory) {
  pg_cuda_memory *m = q->memory;
  if (!memory) return;
  auto at = m->blocks.find(memory);
  if (at == m->blocks.end() || !at->second.used) return;
  block *b = &at->second;
  if (b->own) m->held -= b->bytes;
  b->own = false;
  if (!cache_released()) {
    pg_cuda_enter(q);
    cudaFree(memory);
    m->blocks.erase(at);
    return;
  }
  block *&list = m->lists.find(b->bytes)->second;
  b->used = false;
  b->next = list;
  list = b;
  m->cached += b->bytes;
}

int pg_cuda_take(pg_queue *q, size_t bytes, void **out) {
  pg_cuda_memory *m = q->memory;
  if (pg_cuda_alloc(q, bytes, out) < 0) return -1;
  block *b = &m->blocks.find(*out)->second;
  b->own = true;
  m->held += b->bytes;
  if (m->held > m->most_held) m->most_held = m->held;
  return 0;
}

int64_t pg_cuda_held(pg_queue *q) {
  pg_cuda_memory *m = q->memory;
  const size_t most = m->most_held;
  m->most_held = m->held;
  return (int64_t)most;
}

int pg_cuda_scratch(pg_queue *q, size_t bytes, void **out) {
  pg_cuda_memory *m = q->memory;
  if (bytes > m->scratch_bytes) {
    pg_cuda_release(q, m->scratch);
    m->scratch = NULL;
    m->scratch_bytes = 0;
    if (pg_cuda_take(q, bytes, &m->scratch) < 0) return -1;
    m->scratch_bytes = bytes;
  }
  *out = m->scratch;
  return 0;
}

int pg_cuda_device_info(pg_queue *q, pg_device_info *out) {
  cudaDeviceProp properties;
  size_t available, total;
  PG_CUDA(q, cudaGetDeviceProperties(&properties, q->device));
  PG_CUDA(q, cudaMemGetInfo(&available, &total));
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%.96s, sm_%d%d", properties.name, properties.major,
           properties.minor);
  out->count = q->devices;
  out->memory_free = (int64_t)(available + q->memory->cached);
  out->memory_total = (int64_t)total;
  out->cache_bytes = properties.l2CacheSize;
  return 0;
}

/* ---- copies -------------------------------------------------------------------------------- */
static int make_ring(pg_queue *q, ring *r) {
  if (r->memory) return 0;
  for (int i = 0; i < r->slots; i++)
    if (!r->done[i]) PG_CUDA(q, cudaEventCreateWithFlags(&r->done[i], cudaEventDisableTiming));
  PG_CUDA(q, cudaMallocHost((void **)&r->memory, (size_t)r->slots * r->slot_bytes));
  return 0;
}

static int upload_through(pg_queue *q, ring *r, cudaStream_t stream, void *device, const void *host,
                          size_t bytes) {
  if (make_ring(q, r) < 0) return -1;
  for (size_t at = 0; at < bytes; at += r->slot_bytes) {
    const size_t count = bytes - at < r->slot_bytes ? bytes - at : r->slot_bytes;
    PG_CUDA(q, cudaEventSynchronize(r->done[r->next]));
    memcpy(r->slot(r->next), (const char *)host + at, count);
    PG_CUDA(q, cudaMemcpyAsync((char *)device + at, r->slot(r->next), count, cudaMemcpyHostToDevice,
                               stream));
    PG_CUDA(q, cudaEventRecord(r->done[r->next], stream));
    r->next = (r->next + 1) % r->slots;
  }
  return 0;
}

int pg_cuda_upload(pg_queue *q, void *device, const void *host, size_t bytes) {
  return upload_through(q, &q->memory->main, q->stream, device, host, bytes);
}

/* Until there is a second stream nothing can be beside the first: its creation counts as a join. */
static int make_beside(pg_queue *q) {
  pg_cuda_memory *m = q->memory;
  if (m->stream) return 0;
  for (cudaEvent_t *event : {&m->joined, &m->arrived})
    if (!*event) PG_CUDA(q, cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  PG_CUDA(q, cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
  PG_CUDA(q, cudaEventRecord(m->joined, q->stream));
  m->after_join = true;
  return 0;
}

int pg_cuda_upload_beside(pg_queue *q, void *device, const void *host, size_t bytes) {
  pg_cuda_memory *m = q->memory;
  if (make_beside(q) < 0) return -1;
  if (m->after_join) PG_CUDA(q, cudaStreamWaitEvent(m->stream, m->joined, 0));
  m->after_join = false;
  if (upload_through(q, &m->beside, m->stream, device, host, bytes) < 0) return -1;
  PG_CUDA(q, cudaEventRecord(m->arrived, m->stream));
  m->to_join = true;
  return 0;
}

int pg_cuda_join(pg_queue *q) {
  pg_cuda_memory *m = q->memory;
  if (!m->stream) return 0;
  if (m->to_join) PG_CUDA(q, cudaStreamWaitEvent(q->stream, m->arrived, 0));
  m->to_join = false;
  PG_CUDA(q, cudaEventRecord(m->joined, q->stream));
  m->after_join = true;
  return 0;
}

/* While one slot is copied out, the following ones fill. */
int pg_cuda_download(pg_queue *q, void *host, const void *device, size_t bytes) {
  ring *r = &q->memory->main;
  const size_t slots = (bytes + SLOT_BYTES - 1) / SLOT_BYTES;
  if (make_ring(q, r) < 0) return -1;
  const int first = r->next;
  for (size_t queued = 0, copied = 0; copied < slots; copied++) {
    for (; queued < slots && queued < copied + SLOTS; queued++) {
      const size_t at = queued * SLOT_BYTES;
      PG_CUDA(q, cudaMemcpyAsync(r->slot(r->next), (const char *)device + at,
                                 bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES,
                                 cudaMemcpyDeviceToHost, q->stream));
      PG_CUDA(q, cudaEventRecord(r->done[r->next], q->stream));
      r->next = (r->next + 1) % SLOTS;
    }
    const int slot = (int)(((size_t)first + copied) % SLOTS);
    const size_t at = copied * SLOT_BYTES;
    PG_CUDA(q, cudaEventSynchronize(r->done[slot]));
    memcpy((char *)host + at, r->slot(slot), bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES);
  }
  return slots ? 0 : pg_cuda_synchronize(q);
}

int pg_cuda_copy(pg_queue *q, void *to, const void *from, size_t bytes) {
  if (bytes) PG_CUDA(q, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, q->stream));
  return 0;
}

int pg_cuda_zero(pg_queue *q, void *memory, size_t bytes) {
  if (bytes) PG_CUDA(q, cudaMemsetAsync(memory, 0, bytes, q->stream));
  return 0;
}
