/* Executes CUDA kernels on the CPU. This header is forced into every .cu file compiled for the
 * emulation (clang++ -x c++ -include cudaemu.h); NVIDIA's own headers give types and prototypes,
 * and the library behind this header gives bodies to the runtime, cuBLASLt and NCCL. Test-only.
 *
 * What a kernel file must keep to:
 *  - launch through pg_launch and take dynamic shared memory through PG_DYN_SHARED
 *    (kernels/cuda/launch.cuh); no <<<>>>, no `extern __shared__`, no PTX, no cooperative groups;
 *  - static __shared__ arrays are plain data without constructors;
 *  - bf16 is storage: convert with __float2bfloat16 and __bfloat162float, compute in fp32;
 *  - pointers are kernel arguments, or aligned members of a struct argument;
 *  - warp operations name full masks of existing threads: blocks are whole warps;
 *  - no waiting between blocks: blocks run one after the other.
 *
 * One thread of a block runs at a time, until it waits. Environment (cudaemu_reload reads again):
 *  - CUDAEMU_ORDER=forward|reverse|random:SEED: of blocks, and of threads when several can run
 *  - CUDAEMU_STREAMS=eager|lazy|random:SEED. lazy: work runs only when something waits for it;
 *    random: some of it earlier, as events allow
 *  - CUDAEMU_GUARD=0|1|2. 1: allocations end at an unmapped page, freed memory stays unmapped; 2:
 *    and device memory is unmapped while the host runs (slow)
 *  - CUDAEMU_BLOCKS=unordered: under TSan, blocks of one launch count as concurrent
 *  - CUDAEMU_DEVICES=N. 0: as if there were no driver
 *  - CUDAEMU_MEMORY=BYTES[k|m|g] of a device (16g)
 *  - CUDAEMU_SHARED=BYTES[k|m|g]: shared memory that a block may ask for, at most 227k
 *  - CUDAEMU_FAIL=NAME:N[,...]: the N-th call of NAME fails: a function's name, a kernel's name,
 *    `launch`, or `execute` (the N-th piece of queued work fails; every later call then returns the
 *    error, as after a bad access)
 *  - CUDAEMU_SKIP=NAME:N[,...]: the N-th call of cudaStreamWaitEvent, cudaEventSynchronize or
 *    cudaStreamSynchronize does not wait
 *  - CUDAEMU_TRACE=FILE gets a line for every call that allocates ("cudaMalloc BYTES"), releases,
 *    makes a stream or an event, "wait" for every one that finds work to wait for, and
 *    "ncclGroupEnd OPERATIONS"
 *  - CUDAEMU_NCCL_TIMEOUT=SECONDS: wait for other ranks (60)
 * Mistakes that a GPU answers with undefined behaviour or a hang are printed on standard error as
 * "cudaemu: ..." and end the process with status 86. */
#ifndef PG_CUDAEMU_H
#define PG_CUDAEMU_H
#define PG_CUDAEMU 1

#include <cuda_runtime.h>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
/* One copy per kernel in a section of its own, which is filled with NaN before each block. */
#define __shared__ static __attribute__((section("cudaemu_shared")))

extern "C" {
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern unsigned cudaemu_thread; /* linear index of the running thread */

enum { CUDAEMU_BARRIER, CUDAEMU_AND, CUDAEMU_OR, CUDAEMU_COUNT };
enum { CUDAEMU_SYNCWARP, CUDAEMU_SHUFFLE, CUDAEMU_VOTE, CUDAEMU_REDUCE };
int cudaemu_barrier(int kind, int value);
/* Waits for the lanes of `mask` and returns what each of the 32 lanes brought. */
const unsigned long long *cudaemu_exchange(unsigned mask, int kind, unsigned long long value);
void *cudaemu_dynamic_shared(void);
void cudaemu_fence(void);
[[noreturn]] void cudaemu_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cudaemu_shared_section(char *start, char *stop);
/* Reads the environment again, forgets counted failures and a sticky error. */
void cudaemu_reload(void);

extern char __start_cudaemu_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cudaemu_shared[] __attribute__((weak, visibility("hidden")));
}
static __attribute__((constructor, unused)) void cudaemu_announce_section() {
  cudaemu_shared_section(__start_cudaemu_shared, __stop_cudaemu_shared);
}

/* ---- launches ---------------------------------------------------------------------------- */
struct cudaemu_body {
  virtual ~cudaemu_body() {}
  virtual void run() const = 0; /* one thread */
};
struct cudaemu_argument {
  const void *value;
  size_t bytes;
  bool pointer;
};
/* Takes `body`. `text` starts with the kernel's name. */
cudaError_t cudaemu_launch(const char *text, dim3 grid, dim3 block, size_t smem,
                           cudaStream_t stream, cudaemu_body *body,
                           const cudaemu_argument *arguments, int count);

template <class... P> struct cudaemu_call : cudaemu_body {
  void (*kernel)(P...);
  std::tuple<P...> arguments;
  template <class... A>
  cudaemu_call(void (*k)(P...), A &&...a) : kernel(k), arguments(std::forward<A>(a)...) {}
  void run() const override { std::apply(kernel, arguments); }
};

template <class... P, class... A>
cudaError_t cudaemu_launch_call(const char *text, void (*kernel)(P...), dim3 grid, dim3 block,
                                size_t smem, cudaStream_t stream, A &&...a) {
  static_assert(sizeof...(P) == sizeof...(A), "number of kernel arguments");
  static_assert((sizeof(P) + ... + 0) <= 4096, "kernel arguments above 4 KB");
  auto *body = new cudaemu_call<P...>(kernel, static_cast<P>(std::forward<A>(a))...);
  cudaemu_argument list[sizeof...(P) + 1];
  int n = 0;
  std::apply(
      [&](const P &...v) {
        ((list[n++] = {&v, sizeof v,
                       std::is_pointer<P>::value &&
                           !std::is_function<std::remove_pointer_t<P>>::value}),
         ...);
      },
      body->arguments);
  return cudaemu_launch(text, grid, block, smem, stream, body, list, n);
}

/* ---- synchronisation ----------------------------------------------------------------------- */
static inline void __syncthreads() {
  cudaemu_barrier(CUDAEMU_BARRIER, 0);
}
static inline int __syncthreads_and(int p) {
  return cudaemu_barrier(CUDAEMU_AND, p);
}
static inline int __syncthreads_or(int p) {
  return cudaemu_barrier(CUDAEMU_OR, p);
}
static inline int __syncthreads_count(int p) {
  return cudaemu_barrier(CUDAEMU_COUNT, p);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cudaemu_exchange(mask, CUDAEMU_SYNCWARP, 0);
}
static inline void __threadfence() {
  cudaemu_fence();
}
static inline void __threadfence_block() {
  cudaemu_fence();
}

/* ---- warp operations ------------------------------------------------------------------------ */
enum { warpSize = 32 };
static inline unsigned cudaemu_lane() {
  return cudaemu_thread & 31u;
}
template <class T>
static inline T cudaemu_shuffle(unsigned mask, T value, unsigned source, bool inside) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffled type");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof value);
  const unsigned long long *all = cudaemu_exchange(mask, CUDAEMU_SHUFFLE, bits);
  if (!inside) return value;
  if (!(mask >> source & 1u)) cudaemu_die("shuffle reads lane %u, outside mask %#x", source, mask);
  memcpy(&value, &all[source], sizeof value);
  return value;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  unsigned first = cudaemu_lane() & ~(unsigned)(width - 1);
  return cudaemu_shuffle(mask, value, first + ((unsigned)source & (unsigned)(width - 1)), true);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = cudaemu_lane(), first = lane & ~(unsigned)(width - 1);
  return cudaemu_shuffle(mask, value, lane - delta, lane >= first + delta);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = cudaemu_lane(), end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
  return cudaemu_shuffle(mask, value, lane + delta, lane + delta < end);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  unsigned lane = cudaemu_lane(), end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
  return cudaemu_shuffle(mask, value, lane ^ (unsigned)bits, (lane ^ (unsigned)bits) < end);
}
template <class F> static inline void cudaemu_for_lanes(unsigned mask, F each) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (mask >> lane & 1u) each(lane);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
  const unsigned long long *all = cudaemu_exchange(mask, CUDAEMU_VOTE, p != 0);
  unsigned bits = 0;
  cudaemu_for_lanes(mask, [&](unsigned lane) { bits |= (unsigned)all[lane] << lane; });
  return bits;
}
static inline int __any_sync(unsigned mask, int p) {
  return __ballot_sync(mask, p) != 0;
}
static inline int __all_sync(unsigned mask, int p) {
  return __ballot_sync(mask, p) == mask;
}
template <class T, class F> static inline T cudaemu_reduce(unsigned mask, T value, F join) {
  const unsigned long long *all =
      cudaemu_exchange(mask, CUDAEMU_REDUCE, (unsigned long long)(long long)value);
  unsigned first = (unsigned)__builtin_ctz(mask);
  T out = (T)all[first];
  cudaemu_for_lanes(mask & (mask - 1), [&](unsigned lane) { out = join(out, (T)all[lane]); });
  return out;
}
template <class T> static inline T __reduce_add_sync(unsigned mask, T v) {
  return (T)cudaemu_reduce(mask, (unsigned)v, [](unsigned a, unsigned b) { return a + b; });
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T v) {
  return cudaemu_reduce(mask, v, [](T a, T b) { return a < b ? a : b; });
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T v) {
  return cudaemu_reduce(mask, v, [](T a, T b) { return a > b ? a : b; });
}
static inline unsigned __reduce_and_sync(unsigned mask, unsigned v) {
  return cudaemu_reduce(mask, v, [](unsigned a, unsigned b) { return a & b; });
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return cudaemu_reduce(mask, v, [](unsigned a, unsigned b) { return a | b; });
}

#include "device_math.h"

#endif
