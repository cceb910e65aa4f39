/* How a CUDA file launches kernels, takes dynamic shared memory and reduces over warps and blocks.
 * Host code is ordinary C++: no <<<>>>, so that the tests' emulation (tests/cudaemu) can compile
 * the same file with a host compiler. No PTX and no cooperative groups for the same reason.
 *
 *   __global__ void scale(float *x, int64_t n, float by) { ... }
 *   cudaError_t e = pg_launch(scale, dim3(blocks), dim3(256), 0, stream, x, n, 2.0f);
 *
 * Arguments are converted to the kernel's parameter types. Pass device pointers directly: the
 * emulation checks them there. */
#ifndef PG_CUDA_LAUNCH_CUH
#define PG_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#ifdef PG_CUDAEMU

#define pg_launch(...) cudaemu_launch_call(#__VA_ARGS__, __VA_ARGS__)
#define PG_DYN_SHARED(type, name) type *name = static_cast<type *>(cudaemu_dynamic_shared())

#else

/* Above 48 KB of dynamic shared memory a kernel has to ask for it first. */
template <typename... P, typename... A>
static inline cudaError_t pg_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem,
                                    cudaStream_t stream, A &&...arguments) {
  if (smem > 48 * 1024) {
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

/* PG_DYN_SHARED(float, tile); declares `float *tile`, 16-byte aligned, of the launch's smem bytes.
 * Every use in a kernel names the same memory. */
#define PG_DYN_SHARED(type, name)                                                                  \
  extern __shared__ __align__(16) unsigned char pg_dynamic_shared[];                               \
  type *name = reinterpret_cast<type *>(pg_dynamic_shared)

#endif

/* ---- reductions ---------------------------------------------------------------------------- */
#define PG_WARP 32
#define PG_FULL_MASK 0xffffffffu

struct pg_plus {
  template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct pg_larger {
  template <class T> __device__ T operator()(T a, T b) const { return a < b ? b : a; }
};
struct pg_smaller {
  template <class T> __device__ T operator()(T a, T b) const { return b < a ? b : a; }
};

/* Every lane of a full warp gets the result, the same bits: each step joins the same two values in
 * both lanes, and `join` is commutative. T of 4 or 8 bytes. */
template <class T, class Join> static __device__ inline T pg_warp_reduce(T value, Join join) {
  for (int step = PG_WARP / 2; step > 0; step /= 2)
    value = join(value, __shfl_xor_sync(PG_FULL_MASK, value, step));
  return value;
}

/* The same for a block of whole warps, at most 1024 threads; all threads call it. `scratch` is 32
 * elements of shared memory, free again on return. The order of the sum depends on the block's size
 * only. */
template <class T, class Join>
static __device__ inline T pg_block_reduce(T value, T *scratch, Join join) {
  unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned warps = blockDim.x * blockDim.y * blockDim.z / PG_WARP;
  value = pg_warp_reduce(value, join);
  if (warps == 1) return value;
  if (thread % PG_WARP == 0) scratch[thread / PG_WARP] = value;
  __syncthreads();
  value = scratch[0];
  for (unsigned warp = 1; warp < warps; warp++) value = join(value, scratch[warp]);
  __syncthreads();
  return value;
}

template <class T> static __device__ inline T pg_warp_sum(T value) {
  return pg_warp_reduce(value, pg_plus());
}
template <class T> static __device__ inline T pg_warp_max(T value) {
  return pg_warp_reduce(value, pg_larger());
}
template <class T> static __device__ inline T pg_block_sum(T value, T *scratch) {
  return pg_block_reduce(value, scratch, pg_plus());
}
template <class T> static __device__ inline T pg_block_max(T value, T *scratch) {
  return pg_block_reduce(value, scratch, pg_larger());
}

#endif
