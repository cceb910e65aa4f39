/* Threads of one block as fibers. A thread runs until it waits; then the next ready one runs. A
 * barrier or a warp operation is complete when all its threads have arrived; they become ready in
 * the order that CUDAEMU_ORDER says. Nothing here allocates or copies through libc while fibers
 * run: TSan would take that for the kernel's own accesses.
 *
 * Under TSan a rendezvous releases a token on arrival and acquires it on leaving. Two tokens
 * alternate: with one, a thread that already arrived at the next barrier would order its later
 * accesses before a thread that is still leaving this one. Shuffles and votes order no memory. */
#include "cudaemu.h"
#include "emu.h"
#include <cstdio>
#include <numeric>

extern "C" {
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned cudaemu_thread;
}

namespace emu {

enum { THREADS = 1024, WARPS = THREADS / 32, GROUPS = 8, TOKEN_BLOCKS = 128 };

struct thread {
  uint3 index;
  uint16_t fiber;
  bool started, finished, at_barrier;
};
struct group { /* lanes of one warp that meet under one mask */
  unsigned mask, arrived, phase;
  int kind;
  unsigned long long values[2][32]; /* by phase: a lane may be one operation ahead */
};

const char *kernel_text;
static const launch *running;
static thread threads[THREADS];
static unsigned count, finished, current;
static uint16_t ready[THREADS], free_fibers[THREADS], list[THREADS];
static unsigned ready_head, ready_size, free_count;
static group groups[WARPS][GROUPS];
static unsigned group_count[WARPS];
static unsigned barrier_arrived, barrier_phase, barrier_kind;
static int barrier_value[2];
static uint64_t block_number;
/* Fresh ones for a block and its neighbours, so that blocks stay unordered. */
static uint64_t begin_token, end_token, fence_token, barrier_tokens[TOKEN_BLOCKS][2];
static uint64_t warp_tokens[TOKEN_BLOCKS][WARPS][GROUPS][2];

int name_length(const char *text) {
  int depth = 0, n = 0;
  for (; text[n] && (depth || text[n] != ','); n++) depth += (text[n] == '<') - (text[n] == '>');
  return n;
}

const char *where() {
  static char text[256];
  if (!running) return "";
  snprintf(text, sizeof text, "kernel %.*s, block (%u,%u,%u), thread (%u,%u,%u)",
           name_length(running->text), running->text, blockIdx.x, blockIdx.y, blockIdx.z,
           threadIdx.x, threadIdx.y, threadIdx.z);
  return text;
}

/* ---- scheduling ---------------------------------------------------------------------------- */
/* Forward, threads run in step: those made ready now go last. In reverse they go first, so that a
 * warp runs ahead of the others as far as it can. */
static void make_ready(unsigned n) {
  arrange(list, n);
  bool first = set().direction == REVERSE || (set().direction == RANDOM && random_bits() % 2);
  if (first) ready_head = (ready_head + THREADS - n) % THREADS;
  unsigned at = first ? ready_head : ready_head + ready_size;
  for (unsigned i = 0; i < n; i++) ready[(at + i) % THREADS] = list[i];
  ready_size += n;
}

/* Appends "0-5,7" for the threads that `has` picks. */
template <class F> static int ranges(char *to, int bytes, F has) {
  int used = 0;
  for (unsigned t = 0; t < count && used < bytes - 32; t++) {
    if (!has(t)) continue;
    unsigned last = t;
    while (last + 1 < count && has(last + 1)) last++;
    used += snprintf(to + used, (size_t)(bytes - used), last > t ? "%s%u-%u" : "%s%u",
                     used ? "," : "", t, last);
    t = last;
  }
  return used;
}

[[noreturn]] static void deadlock() {
  char text[1500];
  int used = 0, size = (int)sizeof text;
  if (barrier_arrived) {
    used += snprintf(text, sizeof text, "\n  at __syncthreads: threads ");
    used += ranges(text + used, 300, [](unsigned t) { return threads[t].at_barrier; });
  }
  if (finished) {
    used += snprintf(text + used, (size_t)(size - used), "\n  finished: threads ");
    used += ranges(text + used, 300, [](unsigned t) { return threads[t].finished; });
  }
  for (unsigned w = 0; w < WARPS; w++)
    for (unsigned g = 0; g < group_count[w] && used < size - 100; g++)
      if (groups[w][g].arrived)
        used += snprintf(text + used, (size_t)(size - used),
                         "\n  warp %u: lanes %#x wait for the others of mask %#x", w,
                         groups[w][g].arrived, groups[w][g].mask);
  const launch *l = running;
  running = nullptr;
  cudaemu_die("deadlock in kernel %.*s, block (%u,%u,%u) of %u threads:%s", name_length(l->text),
              l->text, blockIdx.x, blockIdx.y, blockIdx.z, count, text);
}

/* Under TSan every thread needs a fiber of its own, and blocks that count as concurrent must not
 * give the same fiber to the same thread, or its accesses would be ordered. */
static unsigned take_fiber(unsigned t) {
  if (!tsan_present()) return free_fibers[--free_count];
  if (!set().unordered) return t;
  return (unsigned)((t + block_number * count + block_number / 2) % (2 * count));
}

static void fiber_main();
static void next(fiber *from) {
  if (!ready_size) {
    if (finished < count) deadlock();
    fiber_switch(from, host_fiber());
    return;
  }
  current = cudaemu_thread = ready[ready_head];
  ready_head = (ready_head + 1) % THREADS;
  ready_size--;
  thread *t = &threads[current];
  threadIdx = t->index;
  if (!t->started) t->fiber = (uint16_t)take_fiber(current), t->started = true;
  fiber *to = fiber_get(t->fiber, fiber_main);
  if (to != from) fiber_switch(from, to);
}

static void wait() {
  next(fiber_get(threads[current].fiber, fiber_main));
}

static void fiber_main() {
  for (;;) {
    order_after(&begin_token);
    running->body->run();
    order_before(&end_token);
    thread *t = &threads[current];
    t->finished = true;
    finished++;
    if (!tsan_present()) free_fibers[free_count++] = t->fiber;
    next(fiber_get(t->fiber, fiber_main));
  }
}

/* ---- shared memory --------------------------------------------------------------------------- */
static struct { char *start, *stop; } sections[64];
static unsigned section_count;
static char *dynamic, *dynamic_end; /* the launch's bytes; they end at an unmapped page */
enum { DYNAMIC_BYTES = 227 * 1024, DYNAMIC_MAP = 256 * 1024, PAGE = 4096 };

static void fill_nan(char *p, size_t bytes) {
#if defined(__x86_64__)
  __asm__ volatile("rep stosb" : "+D"(p), "+c"(bytes) : "a"(0xff) : "memory");
#else
  for (volatile char *at = p; bytes--; at++) *at = (char)0xff;
#endif
}

void map_again(char *start, char *stop); /* memory.cpp */

static void fresh_shared() {
  for (unsigned i = 0; i < section_count; i++) {
    if (tsan_present() && set().unordered) map_again(sections[i].start, sections[i].stop);
    fill_nan(sections[i].start, (size_t)(sections[i].stop - sections[i].start));
  }
  if (!running->smem) return;
  if (tsan_present() && set().unordered) map_again(dynamic_end - DYNAMIC_MAP, dynamic_end);
  fill_nan(dynamic, running->smem);
}

void *map_guarded(size_t bytes); /* memory.cpp */

static void prepare_dynamic(size_t bytes) {
  if (!dynamic_end) dynamic_end = (char *)map_guarded(DYNAMIC_MAP) + DYNAMIC_MAP;
  dynamic = dynamic_end - (bytes + 15) / 16 * 16;
  if (!asan_present()) return;
  __asan_poison_memory_region(dynamic_end - DYNAMIC_MAP, DYNAMIC_MAP);
  __asan_unpoison_memory_region(dynamic, bytes);
}

/* ---- grids ------------------------------------------------------------------------------------
 */
static void run_block() {
  count = running->block.x * running->block.y * running->block.z;
  finished = ready_head = ready_size = barrier_arrived = free_count = 0;
  barrier_phase = 0;
  barrier_value[0] = barrier_value[1] = 0;
  for (unsigned w = 0; w < WARPS; w++) group_count[w] = 0;
  for (unsigned t = 0; t < count; t++) {
    unsigned x = running->block.x, y = running->block.y;
    threads[t].index = {t % x, t / x % y, t / x / y};
    threads[t].started = threads[t].finished = threads[t].at_barrier = false;
    list[t] = (uint16_t)t;
    free_fibers[free_count++] = (uint16_t)(count - 1 - t);
  }
  fresh_shared();
  make_ready(count);
  host_is_current();
  if (tsan_present()) /* a fiber comes after what its creator did: the host creates them all */
    for (unsigned t = 0; t < count; t++) fiber_get(take_fiber(t), fiber_main);
  next(host_fiber());
}

void run_grid(const launch &l) {
  const uint64_t n = (uint64_t)l.grid.x * l.grid.y * l.grid.z;
  uint64_t multiplier = 1, shift = 0;
  if (set().direction == RANDOM && n > 1) { /* block k -> multiplier * k + shift, a permutation */
    shift = random_bits() % n;
    do multiplier = 1 + random_bits() % n;
    while (std::gcd(multiplier, n) != 1);
  }
  running = &l;
  blockDim = l.block;
  gridDim = l.grid;
  prepare_dynamic(l.smem);
  order_before(&begin_token);
  for (uint64_t k = 0; k < n; k++) {
    uint64_t b = set().direction == REVERSE
                     ? n - 1 - k
                     : (uint64_t)(((unsigned __int128)multiplier * k + shift) % n);
    blockIdx = {(unsigned)(b % l.grid.x), (unsigned)(b / l.grid.x % l.grid.y),
                (unsigned)(b / l.grid.x / l.grid.y)};
    block_number = k;
    run_block();
    if (!set().unordered) order_after(&end_token), order_before(&begin_token);
  }
  order_after(&end_token);
  running = nullptr;
}

} // namespace emu

/* ---- what kernels call
 * --------------------------------------------------------------------------- */
using namespace emu;

int cudaemu_barrier(int kind, int value) {
  if (!running) cudaemu_die("__syncthreads outside a kernel");
  unsigned phase = barrier_phase & 1;
  uint64_t *token = &barrier_tokens[block_number % TOKEN_BLOCKS][phase];
  if (!barrier_arrived) {
    barrier_kind = (unsigned)kind;
    barrier_value[phase] = kind == CUDAEMU_AND;
  } else if (barrier_kind != (unsigned)kind) {
    cudaemu_die("threads of a block meet at different kinds of __syncthreads");
  }
  if (kind == CUDAEMU_AND) barrier_value[phase] &= value != 0;
  if (kind == CUDAEMU_OR) barrier_value[phase] |= value != 0;
  if (kind == CUDAEMU_COUNT) barrier_value[phase] += value != 0;
  order_before(token);
  threads[current].at_barrier = true;
  if (++barrier_arrived == count) {
    barrier_arrived = 0;
    barrier_phase++;
    for (unsigned t = 0; t < count; t++) list[t] = (uint16_t)t, threads[t].at_barrier = false;
    make_ready(count);
  }
  wait();
  order_after(token);
  return barrier_value[phase];
}

const unsigned long long *cudaemu_exchange(unsigned mask, int kind, unsigned long long value) {
  if (!running) cudaemu_die("a warp operation outside a kernel");
  unsigned warp = current / 32, lane = current % 32, g = 0;
  if (!(mask >> lane & 1u)) cudaemu_die("lane %u is not in its own mask %#x", lane, mask);
  while (g < group_count[warp] && groups[warp][g].mask != mask) g++;
  group *at = &groups[warp][g];
  if (g == group_count[warp]) {
    if (g == GROUPS) cudaemu_die("more than %d masks in one warp", GROUPS);
    group_count[warp]++;
    at->mask = mask;
    at->arrived = at->phase = 0;
  }
  unsigned phase = at->phase & 1;
  uint64_t *token = &warp_tokens[block_number % TOKEN_BLOCKS][warp][g][phase];
  if (at->arrived && at->kind != kind)
    cudaemu_die("lanes of mask %#x meet at different warp operations", mask);
  at->kind = kind;
  at->values[phase][lane] = value;
  at->arrived |= 1u << lane;
  if (kind == CUDAEMU_SYNCWARP) order_before(token);
  if (at->arrived == mask) {
    unsigned n = 0;
    at->arrived = 0;
    at->phase++;
    for (lane = 0; lane < 32; lane++)
      if (mask >> lane & 1u) list[n++] = (uint16_t)(warp * 32 + lane);
    make_ready(n);
  }
  wait();
  if (kind == CUDAEMU_SYNCWARP) order_after(token);
  return at->values[phase];
}

void *cudaemu_dynamic_shared() {
  return dynamic;
}

void cudaemu_fence() {
  order_after(&fence_token);
  order_before(&fence_token);
}

void cudaemu_shared_section(char *start, char *stop) {
  if (start == stop) return;
  for (unsigned i = 0; i < section_count; i++)
    if (sections[i].start == start) return;
  if (section_count == 64) cudaemu_die("too many objects with shared memory");
  sections[section_count].start = start;
  sections[section_count++].stop = stop;
}
