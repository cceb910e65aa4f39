/* Inside the emulation: settings, memory table, streams, blocks of fibers. The library itself is
 * compiled without sanitizers; it talks to the ones in the program through the weak symbols below,
 * so that the same objects serve every build. */
#ifndef PG_EMU_H
#define PG_EMU_H

#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

struct cudaemu_body;

namespace emu {

/* ---- settings.cpp ---- */
enum order { FORWARD, REVERSE, RANDOM };
struct settings {
  order direction;
  uint64_t seed;
  bool lazy, shuffled, unordered; /* shuffled: lazy, but some work runs earlier */
  int guard, devices;
  size_t memory; /* per device */
  size_t shared; /* per block, at most */
  double nccl_timeout;
};
const settings &set();
/* Counts a call of `name`; true when CUDAEMU_FAIL asks this one to fail. */
bool injected(const char *name);
/* The same for CUDAEMU_SKIP. */
bool skipped(const char *name);
void trace(const char *what, long long bytes = -1); /* to CUDAEMU_TRACE */
uint64_t random_bits();                             /* of the seeded sequence */
double seconds();                                   /* of a clock that never goes back */
/* Orders n thread or slot numbers as CUDAEMU_ORDER says; `list` holds increasing numbers. */
void arrange(uint16_t *list, unsigned n);

/* One lock for all state. A function of the API takes it once, with `enter`. */
extern std::recursive_mutex lock;
extern thread_local int device;      /* current device of the host thread */
extern cudaError_t sticky;           /* what a failed kernel left behind */
cudaError_t fail(cudaError_t error); /* sets the last error */
/* 0, or the error that a call of `name` returns at once. */
cudaError_t enter(const char *name, cudaError_t injected_error);

/* ---- memory.cpp ---- */
enum kind { DEVICE, PINNED };
struct allocation {
  uintptr_t base;
  size_t bytes;
  uintptr_t map; /* the pages between two unmapped ones */
  size_t map_bytes;
  unsigned long serial;
  int device;
  kind type;
  bool freed, foreign; /* foreign: host memory that cudaHostRegister pinned */
};
/* The allocation that holds `p`, its end included; NULL for host memory. */
const allocation *find(const void *p);
bool is_device(const void *p);
/* Ends the process unless [p, p + bytes) lies in one device (or pinned) allocation. */
void require_device(const void *p, size_t bytes, const char *what);
void check_arguments(const char *kernel, const struct cudaemu_argument *arguments, int count);
void check_slack(); /* after each kernel in guard mode: bytes just past allocations are intact */
/* While one lives, emulated device code may touch device memory. */
struct device_access {
  device_access();
  ~device_access();
};
/* Offset from a 256-byte boundary that the pointer would have on a device. */
size_t misalignment(const void *p, size_t boundary);

/* ---- stream.cpp ---- */
struct stream;
stream *get_stream(cudaStream_t handle); /* NULL when unknown */
/* Appends work. `run` returns false when it has to wait for another rank, and is called again. */
cudaError_t enqueue(cudaStream_t handle, const char *name, std::function<bool()> run);
bool advance(stream *s, uint64_t sequence); /* false: held up by another rank */
cudaError_t wait_stream(stream *s);         /* everything queued until now */
cudaError_t wait_device(int which);

/* ---- block.cpp ---- */
struct launch {
  const char *text;
  dim3 grid, block;
  size_t smem;
  const cudaemu_body *body;
};
void run_grid(const launch &l);
/* "kernel K, block (0,0,0), thread (5,0,0)" of the running thread, or "" outside kernels. */
const char *where();
extern const char *kernel_text;
int name_length(const char *text); /* of the kernel's name at the start of pg_launch's arguments */

/* ---- fiber.cpp ---- */
struct fiber;
void host_is_current();
fiber *host_fiber();
fiber *fiber_get(unsigned index, void (*entry)());
void fiber_switch(fiber *from, fiber *to);
bool tsan_present();
bool asan_present();
void order_after(void *token);  /* acquire */
void order_before(void *token); /* release */

} // namespace emu

extern "C" [[noreturn]] void cudaemu_die(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

#define EMU_WEAK __attribute__((weak))
extern "C" {
void EMU_WEAK __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size);
void EMU_WEAK __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *size);
void EMU_WEAK __asan_poison_memory_region(const volatile void *p, size_t bytes);
void EMU_WEAK __asan_unpoison_memory_region(const volatile void *p, size_t bytes);
void EMU_WEAK *__tsan_get_current_fiber(void);
void EMU_WEAK *__tsan_create_fiber(unsigned flags);
void EMU_WEAK __tsan_switch_to_fiber(void *fiber, unsigned flags);
void EMU_WEAK __tsan_acquire(void *p);
void EMU_WEAK __tsan_release(void *p);
void EMU_WEAK AnnotateIgnoreReadsBegin(const char *file, int line);
void EMU_WEAK AnnotateIgnoreReadsEnd(const char *file, int line);
void EMU_WEAK AnnotateIgnoreWritesBegin(const char *file, int line);
void EMU_WEAK AnnotateIgnoreWritesEnd(const char *file, int line);
}

#endif
