/* Device and pinned memory: every allocation has pages of its own between two unmapped pages, is
 * filled with NaN, and is known by address. In guard mode its last bytes touch the unmapped page,
 * and freed pages are never reused. Under ASan everything outside the allocations is poisoned, and
 * device memory too while the host runs. */
#include "cudaemu.h"
#include "emu.h"
#include <csignal>
#include <cstdio>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace emu {

enum { PAGE = 4096, GUARD_ALIGNMENT = 16, ALIGNMENT = 256, REPORT_DISTANCE = 1 << 20 };
static const unsigned char SLACK = 0xa5;

typedef std::map<uintptr_t, allocation> table; /* by base */
static table &all() {
  static table *t = new table; /* never freed: kernels may run while the process ends */
  return *t;
}
static unsigned long serial;
static size_t used[64]; /* per device */
static int accesses;

static size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

void *map_guarded(size_t bytes) {
  char *map = (char *)mmap(nullptr, bytes + 2 * PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  if (mprotect(map, PAGE, PROT_NONE) || mprotect(map + PAGE + bytes, PAGE, PROT_NONE))
    cudaemu_die("mprotect failed: too many allocations for vm.max_map_count?");
  return map + PAGE;
}

/* TSan forgets what it knew of the pages; the linker script aligns the section to pages. */
void map_again(char *start, char *stop) {
  if (!AnnotateIgnoreWritesBegin) return;
  if ((uintptr_t)start % PAGE || (uintptr_t)stop % PAGE)
    cudaemu_die("CUDAEMU_BLOCKS=unordered needs the program linked with shared.ld");
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  if (mmap(start, (size_t)(stop - start), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    cudaemu_die("mmap over shared memory failed");
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

/* ---- the table ----------------------------------------------------------------------------- */
const allocation *find(const void *p) {
  auto at = all().upper_bound((uintptr_t)p);
  if (at == all().begin()) return nullptr;
  const allocation &a = (--at)->second;
  return !a.freed && (uintptr_t)p <= a.base + a.bytes ? &a : nullptr;
}

bool is_device(const void *p) {
  const allocation *a = find(p);
  return a && a->type == DEVICE;
}

size_t misalignment(const void *p, size_t boundary) {
  const allocation *a = find(p);
  const size_t address = (uintptr_t)p % boundary;
  /* Guard mode moves allocations: the program reads the alignment off the address that it sees. */
  return a && address ? ((uintptr_t)p - a->base) % boundary : address;
}

void require_device(const void *p, size_t bytes, const char *what) {
  if (!bytes) return;
  const allocation *a = find(p);
  if (!a) cudaemu_die("%s: %p is host or freed memory where device memory is expected", what, p);
  size_t offset = (uintptr_t)p - a->base;
  if (bytes > a->bytes - offset)
    cudaemu_die("%s: %zu bytes at offset %zu of allocation #%lu, which has %zu bytes", what, bytes,
                offset, a->serial, a->bytes);
}

/* A word inside a struct argument counts as a host pointer when it addresses mapped memory. */
static bool mapped_host(uintptr_t word) {
  unsigned char resident;
  if (word < 0x10000 || word >> 47 || find((void *)word)) return false;
  /* AddressSanitizer's shadow, where pairs of small numbers seem to point. */
  if (asan_present() && word >= 0x7fff8000 && word < 0x10007fff8000) return false;
  return mincore((void *)(word / PAGE * PAGE), PAGE, &resident) == 0;
}

void check_arguments(const char *kernel, const cudaemu_argument *arguments, int count) {
  for (int i = 0; i < count; i++) {
    const size_t words = arguments[i].bytes / sizeof(uintptr_t);
    if (!arguments[i].pointer && arguments[i].bytes <= sizeof(uintptr_t)) continue;
    for (size_t w = 0; w < words; w++) {
      uintptr_t word;
      memcpy(&word, (const char *)arguments[i].value + w * sizeof word, sizeof word);
      if (arguments[i].pointer ? word && !find((void *)word) : mapped_host(word))
        cudaemu_die("kernel %.*s: argument %d holds %#zx, host or freed memory",
                    name_length(kernel), kernel, i + 1, (size_t)word);
    }
  }
}

/* ---- what may be touched when -----------------------------------------------------------------
 */
static void open_memory(bool open) {
  if (asan_present()) {
    for (auto &entry : all())
      if (entry.second.type == DEVICE && !entry.second.freed)
        (open ? __asan_unpoison_memory_region : __asan_poison_memory_region)((void *)entry.first,
                                                                             entry.second.bytes);
  } else if (set().guard >= 2) {
    for (auto &entry : all())
      if (entry.second.type == DEVICE && !entry.second.freed)
        mprotect((void *)entry.second.map, entry.second.map_bytes,
                 open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}
device_access::device_access() {
  if (!accesses++) open_memory(true);
}
device_access::~device_access() {
  if (!--accesses) open_memory(false);
}

void check_slack() {
  if (set().guard == 0) return;
  for (auto &entry : all()) {
    const allocation &a = entry.second;
    if (a.freed || a.foreign) continue;
    for (uintptr_t p = a.base + a.bytes; p < a.map + a.map_bytes; p++)
      if (*(unsigned char *)p != SLACK)
        cudaemu_die("kernel %.*s changed byte %zu past the end of allocation #%lu of %zu bytes",
                    name_length(kernel_text), kernel_text, (size_t)(p - a.base - a.bytes), a.serial,
                    a.bytes);
  }
}

static void on_fault(int number, siginfo_t *info, void *) {
  uintptr_t p = (uintptr_t)info->si_addr;
  const char *side = nullptr;
  const allocation *near = nullptr;
  size_t distance = REPORT_DISTANCE;
  for (auto &entry : all()) {
    const allocation &a = entry.second;
    size_t d = p < a.base ? a.base - p : p < a.base + a.bytes ? 0 : p - a.base - a.bytes;
    if (d >= distance) continue;
    distance = d, near = &a;
    side = p < a.base ? "before the start of" : d || !a.bytes ? "past the end of" : "inside";
    if (p == a.base + a.bytes) side = "past the end of";
  }
  signal(number, SIG_DFL); /* a second fault, or one that is not ours, is the system's */
  if (info->si_code == SI_KERNEL && *where())
    cudaemu_die("general protection: most likely a misaligned vector access");
  if (near)
    cudaemu_die("access to %#zx, %zu bytes %s %sallocation #%lu of %zu bytes%s", (size_t)p,
                distance, side, near->freed ? "freed " : "", near->serial, near->bytes,
                *where() ? "" : ", by host code");
  if (*where()) cudaemu_die("access to %#zx, which is no device memory", (size_t)p);
}

static void watch_faults() {
  static bool done;
  if (done || asan_present() || tsan_present()) return;
  done = true;
  static char stack[64 << 10]; /* a fiber that overflows its own has none left */
  stack_t alternative = {};
  alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

/* ---- allocation --------------------------------------------------------------------------------
 */
static cudaError_t allocate(void **out, size_t bytes, kind type) {
  watch_faults();
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  if (type == DEVICE && bytes > set().memory - used[device]) return fail(cudaErrorMemoryAllocation);
  const size_t alignment = set().guard ? GUARD_ALIGNMENT : ALIGNMENT;
  const size_t map_bytes = round_up(bytes, PAGE);
  char *map = (char *)map_guarded(map_bytes);
  if (!map) return fail(cudaErrorMemoryAllocation);
  char *base = set().guard ? map + map_bytes - round_up(bytes, alignment) : map;
  memset(map, SLACK, map_bytes);
  memset(base, 0xff, bytes);
  if (set().guard) memset(map, SLACK, (size_t)(base - map));
  if (asan_present()) {
    __asan_poison_memory_region(map, map_bytes);
    if (type == PINNED || accesses) __asan_unpoison_memory_region(base, bytes);
  }
  all()[(uintptr_t)base] = {(uintptr_t)base, bytes, (uintptr_t)map, map_bytes, ++serial,
                            device,          type,  false,          false};
  if (type == DEVICE) used[device] += bytes;
  if (type == DEVICE && set().guard >= 2 && !asan_present() && !accesses)
    mprotect(map, map_bytes, PROT_NONE);
  *out = base;
  return cudaSuccess;
}

static cudaError_t release(void *p, kind type, const char *what) {
  if (!p) return cudaSuccess;
  auto at = all().find((uintptr_t)p);
  if (at == all().end() || at->second.type != type || at->second.freed || at->second.foreign)
    cudaemu_die("%s: %p was not allocated so, or is freed already", what, p);
  allocation &a = at->second;
  if (type == DEVICE) used[a.device] -= a.bytes;
  if (asan_present()) __asan_unpoison_memory_region((void *)a.map, a.map_bytes);
  if (set().guard) { /* gives the pages back, keeps the addresses */
    mmap((void *)a.map, a.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    a.freed = true;
  } else {
    munmap((void *)(a.map - PAGE), a.map_bytes + 2 * PAGE);
    all().erase(at);
  }
  return cudaSuccess;
}

} // namespace emu

using namespace emu;
#define ENTER(name, error)                                                                         \
  std::lock_guard<std::recursive_mutex> hold(lock);                                                \
  if (cudaError_t e = enter(name, error)) return e

extern "C" {

cudaError_t cudaMalloc(void **out, size_t bytes) {
  ENTER("cudaMalloc", cudaErrorMemoryAllocation);
  trace("cudaMalloc", (long long)bytes);
  return allocate(out, bytes, DEVICE);
}
cudaError_t cudaFree(void *p) {
  ENTER("cudaFree", cudaErrorUnknown);
  trace("cudaFree");
  if (cudaError_t error = wait_device(device)) return error;
  return release(p, DEVICE, "cudaFree");
}
cudaError_t cudaMallocHost(void **out, size_t bytes) {
  ENTER("cudaMallocHost", cudaErrorMemoryAllocation);
  trace("cudaMallocHost", (long long)bytes);
  return allocate(out, bytes, PINNED);
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
  ENTER("cudaHostAlloc", cudaErrorMemoryAllocation);
  trace("cudaHostAlloc", (long long)bytes);
  return allocate(out, bytes, PINNED);
}
cudaError_t cudaFreeHost(void *p) {
  ENTER("cudaFreeHost", cudaErrorUnknown);
  trace("cudaFreeHost");
  if (cudaError_t error = wait_device(device)) return error;
  return release(p, PINNED, "cudaFreeHost");
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
  ENTER("cudaHostRegister", cudaErrorMemoryAllocation);
  trace("cudaHostRegister", (long long)bytes);
  if (find(p)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  all()[(uintptr_t)p] = {(uintptr_t)p, bytes,  (uintptr_t)p, bytes, ++serial,
                         device,       PINNED, false,        true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
  ENTER("cudaHostUnregister", cudaErrorUnknown);
  auto at = all().find((uintptr_t)p);
  if (at == all().end() || !at->second.foreign) return fail(cudaErrorHostMemoryNotRegistered);
  all().erase(at);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  ENTER("cudaMemGetInfo", cudaErrorUnknown);
  *total = set().memory;
  *available = *total - used[device];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *p) {
  ENTER("cudaPointerGetAttributes", cudaErrorUnknown);
  const allocation *a = find(p);
  *out = {};
  out->type = !a                  ? cudaMemoryTypeUnregistered
              : a->type == DEVICE ? cudaMemoryTypeDevice
                                  : cudaMemoryTypeHost;
  out->device = a ? a->device : cudaInvalidDeviceId;
  out->devicePointer = a ? (void *)p : nullptr;
  out->hostPointer = a && a->type == DEVICE ? nullptr : (void *)p;
  return cudaSuccess;
}
}
