/* Seeded bugs: `emu_bugs NAME broken|fixed` exits with 0 when the result is right, 1 when it is
 * wrong, and otherwise as the emulation or a sanitizer ends it. check.sh knows which cells of the
 * matrix have to notice which bug. */
#include "kernels/cuda/launch.cuh"
#include "tests/cudaemu/tests/emu_unit.h"

static bool broken;

/* Each thread takes its left neighbour's value, which may not be there yet. */
__global__ void neighbour(const float *x, bool wait, float *out) {
  __shared__ float tile[128];
  unsigned t = threadIdx.x;
  tile[t] = x[t];
  if (wait) __syncthreads();
  out[t] = t ? tile[t - 1] : x[t];
}
static bool barrier() {
  std::vector<float> x;
  for (int i = 0; i < 128; i++) x.push_back((float)i);
  device_array<float> in(x), out(128);
  pg_launch(neighbour, dim3(1), dim3(128), 0, nullptr, in.p, !broken, out.p);
  std::vector<float> got = out.host();
  for (size_t i = 0; i < 128; i++)
    if (got[i] != (i ? x[i - 1] : x[i])) return false;
  return true;
}

/* Two sums through one buffer: the second may overwrite what a slow warp has not read. */
__global__ void two_sums(const float *x, bool wait, float *out) {
  __shared__ float part[4];
  float total[2];
  for (int round = 0; round < 2; round++) {
    float sum = pg_warp_sum(x[threadIdx.x] * (float)(1 + round));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    total[round] = part[0] + part[1] + part[2] + part[3];
    if (wait) __syncthreads();
  }
  out[threadIdx.x] = total[0] * 1000 + total[1];
}
static bool reuse() {
  device_array<float> in(std::vector<float>(128, 1.0f)), out(128);
  pg_launch(two_sums, dim3(1), dim3(128), 0, nullptr, in.p, !broken, out.p);
  for (float v : out.host())
    if (v != 128256) return false;
  return true;
}

/* One vector past the end, read and written. */
__global__ void double_vectors(float4 *x, int n) {
  int i = (int)threadIdx.x;
  if (i < n) x[i].x *= 2;
}
static bool overrun() {
  device_array<float> x(4 * 30, 0);
  pg_launch(double_vectors, dim3(1), dim3(32), 0, nullptr, (float4 *)x.p, broken ? 31 : 30);
  return x.host()[0] == 0;
}
/* Only a scalar past the end of an allocation that does not end at a page. */
__global__ void double_scalars(float *x, int n) {
  int i = (int)threadIdx.x;
  if (i < n) x[i] *= 2;
}
static bool overrun_scalar() {
  device_array<float> x(30, 0);
  pg_launch(double_scalars, dim3(1), dim3(32), 0, nullptr, x.p, broken ? 31 : 30);
  return x.host()[0] == 0;
}

/* The host reads a staging buffer before the stream has filled it. */
static bool stream_sync() {
  cudaStream_t s;
  float *host;
  cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  cudaMallocHost(&host, 4);
  device_array<float> x(std::vector<float>(1, 3.0f));
  cudaMemcpyAsync(host, x.p, 4, cudaMemcpyDeviceToHost, s);
  if (!broken) cudaStreamSynchronize(s);
  bool right = host[0] == 3;
  cudaStreamDestroy(s);
  cudaFreeHost(host);
  return right;
}
/* A second stream reads what the first one writes, without an event between. */
static bool event() {
  cudaStream_t a, b;
  cudaEvent_t done;
  float *host;
  cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
  cudaEventCreate(&done);
  cudaMallocHost(&host, 4);
  device_array<float> x(std::vector<float>(1, 3.0f));
  pg_launch(double_scalars, dim3(1), dim3(32), 0, a, x.p, 1);
  cudaEventRecord(done, a);
  if (!broken) cudaStreamWaitEvent(b, done, 0);
  cudaMemcpyAsync(host, x.p, 4, cudaMemcpyDeviceToHost, b);
  cudaStreamSynchronize(b);
  bool right = host[0] == 6;
  cudaEventDestroy(done);
  cudaStreamDestroy(a);
  cudaStreamDestroy(b);
  cudaFreeHost(host);
  return right;
}

/* A second stream refills a buffer that the first may still have to read. */
static bool refill() {
  cudaStream_t a, b;
  cudaEvent_t taken, filled;
  float *host, *from;
  const int rounds = 20;
  cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
  cudaEventCreate(&taken);
  cudaEventCreate(&filled);
  cudaMallocHost(&host, rounds * 4);
  cudaMallocHost(&from, rounds * 4);
  device_array<float> x(1);
  for (int i = 0; i < rounds; i++) {
    from[i] = (float)i;
    if (i && !broken) cudaStreamWaitEvent(b, taken, 0);
    cudaMemcpyAsync(x.p, from + i, 4, cudaMemcpyHostToDevice, b);
    cudaEventRecord(filled, b);
    cudaStreamWaitEvent(a, filled, 0);
    cudaMemcpyAsync(host + i, x.p, 4, cudaMemcpyDeviceToHost, a);
    cudaEventRecord(taken, a);
  }
  cudaStreamSynchronize(a);
  bool right = true;
  for (int i = 0; i < rounds; i++) right = right && host[i] == (float)i;
  cudaEventDestroy(taken);
  cudaEventDestroy(filled);
  cudaStreamDestroy(a);
  cudaStreamDestroy(b);
  cudaFreeHost(host);
  cudaFreeHost(from);
  return right;
}

static bool pointer() {
  float on_host[32] = {0};
  device_array<float> x(32, 0);
  pg_launch(double_scalars, dim3(1), dim3(32), 0, nullptr, broken ? on_host : x.p, 32);
  cudaDeviceSynchronize();
  return true;
}
static bool host_read() {
  device_array<float> x(32, 0);
  return broken ? *(volatile float *)x.p == 0 : x.host()[0] == 0;
}

__global__ void copy_vectors(const float4 *x, float4 *out) {
  out[threadIdx.x] = x[threadIdx.x];
}
static bool misaligned() {
  device_array<float> x(4 * 33, 0), out(4 * 32);
  float *from = x.p + (broken ? 1 : 0);
  pg_launch(copy_vectors, dim3(1), dim3(32), 0, nullptr, (const float4 *)from, (float4 *)out.p);
  return out.host()[0] == 0;
}

__global__ void add_one(float *sum, bool atomic) {
  if (atomic)
    atomicAdd(sum, 1.0f);
  else
    *sum += 1.0f;
}
static bool blocks() {
  device_array<float> sum(1, 0);
  pg_launch(add_one, dim3(5), dim3(1), 0, nullptr, sum.p, !broken);
  return sum.host()[0] == 5;
}

__global__ void divergent_barrier(float *x, int n) {
  if ((int)threadIdx.x < n) {
    x[threadIdx.x] = 1;
    __syncthreads();
  }
}
static bool divergent() {
  device_array<float> x(64, 0);
  pg_launch(divergent_barrier, dim3(1), dim3(64), 0, nullptr, x.p, broken ? 40 : 64);
  return x.host()[0] == 1;
}

__global__ void accumulate(float *out, bool clear) {
  __shared__ float sum[32];
  if (clear) sum[threadIdx.x] = 0;
  sum[threadIdx.x] += 1;
  out[threadIdx.x] = sum[threadIdx.x];
}
static bool uninitialised() {
  device_array<float> x(32);
  pg_launch(accumulate, dim3(1), dim3(32), 0, nullptr, x.p, !broken);
  return x.host()[5] == 1;
}

__global__ void past_shared(float *out, unsigned shift) {
  __shared__ float tile[64];
  tile[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x + shift];
}
static bool shared_overrun() {
  device_array<float> x(64);
  pg_launch(past_shared, dim3(1), dim3(64), 0, nullptr, x.p, broken ? 1u : 0u);
  return x.host()[0] == 1;
}

int main(int count, char **words) {
  static const struct {
    const char *name;
    bool (*run)();
  } bugs[] = {{"barrier", barrier},
              {"reuse", reuse},
              {"overrun", overrun},
              {"overrun_scalar", overrun_scalar},
              {"sync", stream_sync},
              {"event", event},
              {"refill", refill},
              {"pointer", pointer},
              {"host_read", host_read},
              {"misaligned", misaligned},
              {"blocks", blocks},
              {"divergent", divergent},
              {"uninitialised", uninitialised},
              {"shared_overrun", shared_overrun}};
  unit_bad = 0;
  for (const auto &bug : bugs)
    if (count == 3 && !strcmp(words[1], bug.name)) {
      broken = !strcmp(words[2], "broken");
      return bug.run() ? 0 : 1;
    }
  fprintf(stderr, "emu_bugs NAME broken|fixed\n");
  return 2;
}
