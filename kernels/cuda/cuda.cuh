/* Shared by the CUDA kernels: the queue, errors, typed loads and stores, grids.
 *
 * Every operation of kernels.h is pg_cuda_NAME in the file of that name, queued on q->stream and
 * not waited for. Host code is C++ without exceptions of its own; NVIDIA's calls go through PG_CUDA
 * and kernels through PG_CUDA_LAUNCH, both of which leave a text and return -1 from the operation.
 *
 * Activations are templates over T = float or pg_bf16; arithmetic is fp32. The compiler may
 * contract a * b + c: where bits are specified (apply, lerp) use __fmul_rn and __fadd_rn. */
#ifndef PG_CUDA_CUH
#define PG_CUDA_CUH

#include "launch.cuh"
#include <cuda_bf16.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include "../kernels.h"
#define PG_CUDA_DECLARE(op) pg_##op##_fn pg_cuda_##op;
PG_KERNELS(PG_CUDA_DECLARE)
#undef PG_CUDA_DECLARE
int pg_cuda_queue_new(const pg_queue_options *options, pg_queue **out, char *message, size_t size);
void pg_cuda_queue_free(pg_queue *q);
const char *pg_cuda_message(const pg_queue *q);
int64_t pg_cuda_held(pg_queue *q);
}

typedef __nv_bfloat16 pg_bf16;

struct pg_cuda_memory;    /* memory.cu */
struct pg_cuda_products;  /* gemm.cu */
struct pg_cuda_stamps;    /* timing.cu */
struct pg_cuda_attention; /* attention_path.cu */

struct pg_queue {
  cudaStream_t stream;
  int device, devices; /* index, and how many there are */
  int multiprocessors;
  size_t shared;    /* bytes of shared memory that a block may ask for */
  bool synchronous; /* PG_CUDA_SYNC=1: wait after every launch */
  const char *last; /* the kernel or call queued last */
  struct pg_cuda_memory *memory;
  struct pg_cuda_products *products;
  struct pg_cuda_stamps *stamps;
  struct pg_cuda_attention *attention;
  char message[512];
};

/* ---- errors (queue.cu) ------------------------------------------------------------------- */
/* Leave a text in the queue; gives -1. */
int pg_cuda_refuse(pg_queue *q, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for a failed call; of `call` the part before a parenthesis is named. */
int pg_cuda_fail(pg_queue *q, const char *call, cudaError_t error);
/* Notes a launch and its immediate error; 0 or -1. */
int pg_cuda_launched(pg_queue *q, const char *kernel, cudaError_t error);

/* The current device belongs to a thread, and the queue may have changed hands. */
static inline void pg_cuda_enter(const pg_queue *q) {
  if (q->devices > 1) cudaSetDevice(q->device);
}
/* PG_CUDA(q, cudaMemcpyAsync(...)); */
#define PG_CUDA(q, call)                                                                           \
  do {                                                                                             \
    pg_cuda_enter(q);                                                                              \
    cudaError_t error_ = (call);                                                                   \
    if (error_ != cudaSuccess) return pg_cuda_fail(q, #call, error_);                              \
  } while (0)
/* PG_CUDA_LAUNCH(q, kernel<T>, dim3(blocks), dim3(256), 0, x, n); a kernel with several template
 * arguments goes in parentheses. */
#define PG_CUDA_LAUNCH(q, kernel, grid, block, smem, ...)                                          \
  do {                                                                                             \
    if (pg_cuda_launched(q, #kernel,                                                               \
                         pg_launch(kernel, grid, block, smem, (q)->stream, __VA_ARGS__)) < 0)      \
      return -1;                                                                                   \
  } while (0)
/* PG_CUDA_TYPED(type, T, return forward<T>(q, x)); the statement once for each type. */
#define PG_CUDA_TYPED(type, T, ...)                                                                \
  do {                                                                                             \
    if ((type) == PG_BF16) {                                                                       \
      typedef pg_bf16 T;                                                                           \
      __VA_ARGS__;                                                                                 \
    } else {                                                                                       \
      typedef float T;                                                                             \
      __VA_ARGS__;                                                                                 \
    }                                                                                              \
  } while (0)

/* ---- memory (memory.cu) ------------------------------------------------------------------ */
/* Device scratch for one operation, valid for work queued until the next call; it only grows.
 * 256-byte aligned. 0 or -1. */
int pg_cuda_scratch(pg_queue *q, size_t bytes, void **out);
/* pg_cuda_alloc for the backend's own use, which `held` counts; pg_cuda_release gives it back. */
int pg_cuda_take(pg_queue *q, size_t bytes, void **out);
/* What an allocation of so many bytes takes. */
size_t pg_cuda_size_class(size_t bytes);
/* Bytes that products share, taken with the first. */
static constexpr size_t PG_CUDA_WORKSPACE = (size_t)32 << 20;
/* Parts of the queue, made and freed with it. */
int pg__cuda_memory_new(pg_queue *q);
void pg__cuda_memory_free(pg_queue *q);
void pg__cuda_products_free(pg_queue *q);
void pg__cuda_stamps_free(pg_queue *q);
void pg__cuda_attention_free(pg_queue *q);

/* Bytes that the diameter of a matrix takes: diameter.cu. */
int64_t pg_cuda_diameter_bytes(int64_t rows, int64_t columns);

/* `#pragma unroll pg_whole` before loops that have to be unrolled completely for their arrays to
 * become registers: the emulation's builds with sanitizers would take five times as long. */
#ifdef PG_CUDAEMU
static constexpr int pg_whole = 1;
#else
static constexpr int pg_whole = 256;
#endif

/* ---- grids -------------------------------------------------------------------------------- */
#define PG_CUDA_BLOCK 256
static inline int64_t pg_blocks(int64_t n, int64_t each) {
  return (n + each - 1) / each;
}
/* Blocks of PG_CUDA_BLOCK threads for a grid-stride loop over n items: enough to fill the device
 * eight times over at most, so that grids stay within 31 bits. */
static inline dim3 pg_stride_grid(const pg_queue *q, int64_t n) {
  int64_t most = (int64_t)q->multiprocessors * 8, blocks = pg_blocks(n, PG_CUDA_BLOCK);
  return dim3((unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most));
}
/* for (PG_STRIDE(i, n)) visits 0..n-1 in a one-dimensional grid. */
#define PG_STRIDE(i, n)                                                                            \
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;                                      \
  i < (n);                                                                                         \
  i += (int64_t)gridDim.x * blockDim.x

/* n / by of numbers that are not negative: 64-bit division costs several times more than a 32-bit
 * one. */
static __device__ inline int64_t pg_quotient(int64_t n, int64_t by) {
  return (n | by) >> 32 ? n / by : (int64_t)((unsigned)n / (unsigned)by);
}

/* ---- loads and stores --------------------------------------------------------------------- */
static __device__ inline float pg_load(const float *from) {
  return *from;
}
static __device__ inline float pg_load(const pg_bf16 *from) {
  return __bfloat162float(*from);
}
static __device__ inline void pg_store(float *to, float value) {
  *to = value;
}
static __device__ inline void pg_store(pg_bf16 *to, float value) {
  *to = __float2bfloat16(value);
}

/* 16 bytes: 4 floats or 8 bf16. */
template <class T> struct pg_wide { static constexpr int width = 16 / (int)sizeof(T); };
static __device__ inline void pg_load_wide(const float *from, float (&to)[4]) {
  const float4 v = *reinterpret_cast<const float4 *>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
static __device__ inline void pg_store_wide(float *to, const float (&from)[4]) {
  *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
/* A bf16 is the upper half of a float; the lower half-word of each pair comes first in memory. */
static __device__ inline void pg_load_wide(const pg_bf16 *from, float (&to)[8]) {
  const uint4 v = *reinterpret_cast<const uint4 *>(from);
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
static __device__ inline unsigned pg_bf16_bits(float value) {
  return __bfloat16_as_ushort(__float2bfloat16(value));
}
static __device__ inline void pg_store_wide(pg_bf16 *to, const float (&from)[8]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    words[i] = pg_bf16_bits(from[2 * i]) | pg_bf16_bits(from[2 * i + 1]) << 16;
  *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}
/* Four elements, of 16 or 8 bytes. */
static __device__ inline void pg_load_quad(const float *from, float (&to)[4]) {
  pg_load_wide(from, to);
}
static __device__ inline void pg_load_quad(const pg_bf16 *from, float (&to)[4]) {
  const uint2 v = *reinterpret_cast<const uint2 *>(from);
  to[0] = __uint_as_float(v.x << 16), to[1] = __uint_as_float(v.x & 0xffff0000u);
  to[2] = __uint_as_float(v.y << 16), to[3] = __uint_as_float(v.y & 0xffff0000u);
}
static __device__ inline void pg_store_quad(pg_bf16 *to, const float (&from)[4]) {
  *reinterpret_cast<uint2 *>(to) = make_uint2(pg_bf16_bits(from[0]) | pg_bf16_bits(from[1]) << 16,
                                              pg_bf16_bits(from[2]) | pg_bf16_bits(from[3]) << 16);
}
/* One element, for rows that 16-byte accesses do not fit. */
template <class T> static __device__ inline void pg_load_wide(const T *from, float (&to)[1]) {
  to[0] = pg_load(from);
}
template <class T> static __device__ inline void pg_store_wide(T *to, const float (&from)[1]) {
  pg_store(to, from[0]);
}
/* Whether 16-byte accesses may start at the pointer, and at every row of `ld` elements. */
template <class T> static __host__ __device__ inline bool pg_wide_aligned(const T *p) {
  return ((uintptr_t)p & 15) == 0;
}
template <class T> static __host__ __device__ inline bool pg_wide_rows(const T *p, int64_t ld) {
  return pg_wide_aligned(p) && ld % pg_wide<T>::width == 0;
}

#endif
