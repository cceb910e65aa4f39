/* Kernels on the emulated device: indices, barriers, warp operations, atomics, shared memory. Built
 * by nvcc, the same tests say whether the emulation and a GPU agree. */
#include "kernels/cuda/launch.cuh"
#include "tests/cudaemu/tests/emu_unit.h"
#include <cstdint>
#include <cuda_bf16.h>
#include <vector>

static_assert(alignof(float4) == 16 && alignof(int4) == 16 && alignof(float2) == 8, "as on device");

__global__ void write_indices(int *out, int *visits) {
  unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned size = blockDim.x * blockDim.y * blockDim.z;
  out[block * size + thread] = (int)(block * 10000 + thread);
  atomicAdd(visits + block * size + thread, 1);
}
TEST(every_thread_of_every_block_runs_once) {
  const unsigned blocks = 5 * 3 * 7, threads = 8 * 4 * 2;
  device_array<int> out(blocks * threads), visits(blocks * threads, 0);
  CHECK_CUDA(pg_launch(write_indices, dim3(5, 3, 7), dim3(8, 4, 2), 0, nullptr, out.p, visits.p));
  std::vector<int> got = out.host(), seen = visits.host();
  for (unsigned i = 0; i < blocks * threads; i++) {
    CHECK(got[i] == (int)(i / threads * 10000 + i % threads), "%u: %d", i, got[i]);
    CHECK(seen[i] == 1, "%u: %d", i, seen[i]);
  }
}

/* Sums rows of [n, d] of integers, so that every order gives the same bits. */
template <class T> __global__ void row_sums(const T *x, int d, T *out) {
  __shared__ T scratch[32];
  T sum = 0;
  for (int j = (int)threadIdx.x; j < d; j += (int)blockDim.x) sum += x[(int64_t)blockIdx.x * d + j];
  sum = pg_block_sum(sum, scratch);
  T largest = pg_block_max((T)threadIdx.x, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = sum + 1000 * largest;
}
template <class T> static void check_row_sums(unsigned threads, int d) {
  std::vector<T> x;
  for (int i = 0; i < 6 * d; i++) x.push_back((T)(i * 7 % 11 - 5));
  device_array<T> in(x), out(6);
  CHECK_CUDA(pg_launch(row_sums<T>, dim3(6), dim3(threads), 0, nullptr, in.p, d, out.p));
  std::vector<T> got = out.host();
  for (int i = 0; i < 6; i++) {
    T want = 1000 * (T)(threads - 1);
    for (int j = 0; j < d; j++) want += x[(size_t)(i * d + j)];
    CHECK(got[(size_t)i] == want, "row %d of %d, %u threads: %g, want %g", i, d, threads,
          (double)got[(size_t)i], (double)want);
  }
}
TEST(block_reductions) {
  for (unsigned threads : {32u, 96u, 1024u})
    for (int d : {1, 37, 1500}) {
      check_row_sums<float>(threads, d);
      check_row_sums<double>(threads, d);
      check_row_sums<int>(threads, d);
    }
}

__global__ void warp_operations(int *out) {
  int lane = (int)threadIdx.x % 32, *to = out + threadIdx.x * 12;
  to[0] = __shfl_sync(PG_FULL_MASK, lane, 5);
  to[1] = __shfl_up_sync(PG_FULL_MASK, lane, 3);
  to[2] = __shfl_down_sync(PG_FULL_MASK, lane, 3);
  to[3] = __shfl_xor_sync(PG_FULL_MASK, lane, 9);
  to[4] = __shfl_down_sync(PG_FULL_MASK, lane, 3, 8);
  to[5] = __shfl_sync(PG_FULL_MASK, lane, 11, 8);
  to[6] = (int)__ballot_sync(PG_FULL_MASK, lane % 3 == 0);
  to[7] = __any_sync(PG_FULL_MASK, lane == 31) + 2 * __all_sync(PG_FULL_MASK, lane < 31);
  to[8] = __reduce_add_sync(PG_FULL_MASK, lane - 40);
  to[9] = __reduce_max_sync(PG_FULL_MASK, -lane) * 100 + __reduce_min_sync(PG_FULL_MASK, lane - 7);
  to[10] = lane < 16 ? __shfl_xor_sync(0xffffu, lane, 1) : __shfl_xor_sync(0xffff0000u, lane, 2);
  to[11] = __syncthreads_count(lane < 4) + 1000 * __syncthreads_or(threadIdx.x == 40) +
           2000 * __syncthreads_and(threadIdx.x != 40);
}
TEST(warp_operations_as_documented) {
  device_array<int> out(64 * 12);
  CHECK_CUDA(pg_launch(warp_operations, dim3(1), dim3(64), 0, nullptr, out.p));
  std::vector<int> all = out.host();
  unsigned thirds = 0;
  for (unsigned lane = 0; lane < 32; lane += 3) thirds |= 1u << lane;
  for (int t = 0; t < 64; t++) {
    int lane = t % 32, first = lane / 8 * 8;
    int want[12] = {5,
                    lane < 3 ? lane : lane - 3,
                    lane > 28 ? lane : lane + 3,
                    lane ^ 9,
                    lane + 3 < first + 8 ? lane + 3 : lane,
                    first + 3,
                    (int)thirds,
                    1,
                    31 * 16 - 40 * 32,
                    -7,
                    lane < 16 ? lane ^ 1 : lane ^ 2,
                    8 + 1000};
    for (int i = 0; i < 12; i++)
      CHECK(all[(size_t)(t * 12 + i)] == want[i], "thread %d, value %d: %d, want %d", t, i,
            all[(size_t)(t * 12 + i)], want[i]);
  }
}

__global__ void count_in(float *f, double *d, unsigned long long *u, int *most, int *least,
                         unsigned *swapped) {
  int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(f, 1.0f);
  atomicAdd(d, 0.5);
  atomicAdd(u, 3ull);
  atomicMax(most, i);
  atomicMin(least, -i);
  unsigned old = atomicAdd(swapped, 0u), expected;
  do expected = old;
  while ((old = atomicCAS(swapped, expected, expected + 2)) != expected);
}
TEST(atomics) {
  device_array<float> f(1, 0);
  device_array<double> d(1, 0);
  device_array<unsigned long long> u(1, 0);
  device_array<int> most(1, 0), least(1, 0);
  device_array<unsigned> swapped(1, 0);
  CHECK_CUDA(pg_launch(count_in, dim3(3), dim3(64), 0, nullptr, f.p, d.p, u.p, most.p, least.p,
                       swapped.p));
  CHECK(f.host()[0] == 192 && d.host()[0] == 96 && u.host()[0] == 576, "sums");
  CHECK(most.host()[0] == 191 && least.host()[0] == -191 && swapped.host()[0] == 384, "others");
}

#ifdef PG_CUDAEMU
/* Shared memory starts as NaN in every block, static and dynamic alike. */
__global__ void read_shared(int *fresh) {
  __shared__ float fixed[64];
  PG_DYN_SHARED(float, dynamic);
  if (isnan(fixed[threadIdx.x]) && isnan(dynamic[threadIdx.x])) atomicAdd(fresh, 1);
  __syncthreads();
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
}
TEST(shared_memory_starts_as_nan) {
  device_array<int> fresh(1, 0);
  CHECK_CUDA(pg_launch(read_shared, dim3(3), dim3(64), 64 * sizeof(float), nullptr, fresh.p));
  CHECK(fresh.host()[0] == 192, "%d of 192", fresh.host()[0]);
}

#endif

__global__ void transpose(const float4 *x, int rows,
                          __nv_bfloat16 *out) { /* [rows,4] -> [4,rows] */
  PG_DYN_SHARED(float, tile);
  int i = (int)threadIdx.x;
  float4 v = x[i];
  tile[i] = v.x, tile[rows + i] = v.y, tile[2 * rows + i] = v.z, tile[3 * rows + i] = v.w;
  __syncthreads();
  for (int j = i; j < 4 * rows; j += (int)blockDim.x) out[j] = __float2bfloat16(tile[j]);
}
TEST(vectors_dynamic_shared_memory_and_bf16) {
  const int rows = 1024;
  std::vector<float> x;
  for (int i = 0; i < 4 * rows; i++) x.push_back((float)(i % 251));
  device_array<float> in(x);
  device_array<__nv_bfloat16> out(4 * rows);
  CHECK_CUDA(pg_launch(transpose, dim3(1), dim3(rows), 4 * rows * sizeof(float), nullptr,
                       (const float4 *)in.p, rows, out.p));
  std::vector<__nv_bfloat16> got = out.host();
  for (int i = 0; i < rows; i++)
    for (int c = 0; c < 4; c++)
      CHECK(__bfloat162float(got[(size_t)(c * rows + i)]) == x[(size_t)(i * 4 + c)], "%d %d", i, c);
}

__global__ void functions(float x, double y, float *out, double *wide) {
  out[0] = rsqrtf(x), out[1] = __expf(x), out[2] = __fmul_rn(x, x), out[3] = fmaf(x, x, 1.0f);
  out[4] = min(x, 2.0f), out[5] = __int_as_float(__float_as_int(x)), out[6] = __ldg(&out[0]);
  out[7] = (float)max(int64_t(3), int64_t(-4)), out[8] = __logf(x), out[9] = (float)__clz(255);
  wide[0] = rsqrt(y), wide[1] = __dmul_rn(y, y), wide[2] = fma(y, y, -y), wide[3] = tanh(y);
}
TEST(functions_of_the_device) {
  device_array<float> out(10);
  device_array<double> wide(4);
  CHECK_CUDA(pg_launch(functions, dim3(1), dim3(1), 0, nullptr, 4, 0.25, out.p, wide.p));
  std::vector<float> f = out.host();
  std::vector<double> d = wide.host();
  CHECK_CLOSE(f[0], 0.5, 0);
  CHECK_CLOSE(f[1], exp(4.0), 1e-7); /* one rounding of fp32 */
  CHECK(f[2] == 16 && f[3] == 17 && f[4] == 2 && f[5] == 4 && f[6] == 0.5f && f[7] == 3, "fp32");
  CHECK_CLOSE(f[8], log(4.0), 1e-7);
  CHECK(f[9] == 24 && d[0] == 2 && d[1] == 0.0625 && d[2] == -0.1875, "fp64");
  CHECK_CLOSE(d[3], tanh(0.25), 1e-15);
}

#ifdef PG_CUDAEMU
/* The orders differ where the environment says so, and repeat. */
__global__ void note_order(int *next, int *order) {
  __syncthreads();
  order[atomicAdd(next, 1)] = (int)(blockIdx.x * blockDim.x + threadIdx.x);
}
static std::vector<int> order_under(const char *text) {
  environment e("CUDAEMU_ORDER", text);
  device_array<int> next(1, 0), order(96);
  CHECK_CUDA(pg_launch(note_order, dim3(3), dim3(32), 0, nullptr, next.p, order.p));
  return order.host();
}
TEST(orders_of_threads_and_blocks) {
  std::vector<int> forward = order_under("forward"), reverse = order_under("reverse");
  std::vector<int> one = order_under("random:1"), two = order_under("random:2");
  for (int i = 0; i < 96; i++)
    CHECK(forward[(size_t)i] == i && reverse[(size_t)i] == 95 - i, "position %d", i);
  CHECK(one != two && one != forward && one == order_under("random:1"), "random orders");
}

#endif

int main() {
  RUN(every_thread_of_every_block_runs_once);
  RUN(block_reductions);
  RUN(warp_operations_as_documented);
  RUN(atomics);
  RUN(vectors_dynamic_shared_memory_and_bf16);
  RUN(functions_of_the_device);
#ifdef PG_CUDAEMU
  RUN(shared_memory_starts_as_nan);
  RUN(orders_of_threads_and_blocks);
#endif
  return unit_report();
}
