/* The runtime's host side: memory, streams, events, failures on demand, and the reports of mistakes
 * that a GPU would not report. */
#include "kernels/cuda/launch.cuh"
#include "tests/cudaemu/tests/emu_unit.h"

__global__ void set_all(float *x, int n, float value) {
  int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] = value;
}
static cudaError_t set(float *x, int n, float value, cudaStream_t s = nullptr) {
  return pg_launch(set_all, dim3((unsigned)(n + 31) / 32), dim3(32), 0, s, x, n, value);
}
struct pinned {
  float *p = nullptr;
  explicit pinned(size_t n) { CHECK_CUDA(cudaMallocHost(&p, n * sizeof(float))); }
  ~pinned() { cudaFreeHost(p); }
};
struct two_streams {
  cudaStream_t a, b;
  two_streams() {
    CHECK_CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  }
  ~two_streams() { cudaStreamDestroy(a), cudaStreamDestroy(b); }
};

TEST(memory_is_counted_and_limited) {
  environment e("CUDAEMU_MEMORY", "1m");
  size_t available, total, before;
  void *p = nullptr, *q = &p;
  CHECK_CUDA(cudaMemGetInfo(&before, &total));
  CHECK(total == 1 << 20, "%zu", total);
  CHECK_CUDA(cudaMalloc(&p, 700 << 10));
  CHECK_CUDA(cudaMemGetInfo(&available, &total));
  CHECK(before - available == 700 << 10, "%zu", available);
  CHECK(cudaMalloc(&q, 500 << 10) == cudaErrorMemoryAllocation && !q, "more than there is");
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation, "left behind");
  CHECK(cudaGetLastError() == cudaSuccess, "once");
  cudaFree(p);
}

TEST(copies_of_every_kind) {
  std::vector<float> x(100, 3.0f);
  device_array<float> a(x), b(100, 0);
  pinned host(100);
  CHECK_CUDA(cudaMemcpyAsync(b.p, a.p, 400, cudaMemcpyDeviceToDevice, nullptr));
  CHECK_CUDA(cudaMemcpyAsync(host.p, b.p, 400, cudaMemcpyDefault, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK(host.p[0] == 3 && host.p[99] == 3, "%g", host.p[99]);
  CHECK_CUDA(cudaMemcpy2D(host.p, 8, a.p, 16, 8, 10, cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemset(b.p, 0, 400));
  CHECK(b.host()[50] == 0, "cleared");
}

/* Lazy streams show what nobody waited for. */
TEST(lazy_streams_run_when_waited_for) {
  environment e("CUDAEMU_STREAMS", "lazy");
  two_streams s;
  device_array<float> x(32, 0);
  pinned host(32);
  host.p[0] = -1;
  CHECK_CUDA(set(x.p, 32, 5, s.a));
  CHECK_CUDA(cudaMemcpyAsync(host.p, x.p, 128, cudaMemcpyDeviceToHost, s.a));
  CHECK(host.p[0] == -1, "ran at once");
  CHECK(cudaStreamQuery(s.a) == cudaErrorNotReady, "query");
  CHECK_CUDA(cudaStreamSynchronize(s.b));
  CHECK(host.p[0] == -1, "another stream's wait ran it");
  CHECK_CUDA(cudaStreamSynchronize(s.a));
  CHECK(host.p[0] == 5, "%g", host.p[0]);
  CHECK_CUDA(cudaStreamQuery(s.a));
}
TEST(events_order_streams) {
  for (const char *kind : {"lazy", "eager"}) {
    environment e("CUDAEMU_STREAMS", kind);
    two_streams s;
    cudaEvent_t done, start;
    device_array<float> x(32, 0);
    pinned host(32);
    float milliseconds = -1;
    CHECK_CUDA(cudaEventCreate(&start));
    CHECK_CUDA(cudaEventCreateWithFlags(&done, cudaEventDefault));
    CHECK_CUDA(cudaEventRecord(start, s.a));
    CHECK_CUDA(set(x.p, 32, 7, s.a));
    CHECK_CUDA(cudaEventRecord(done, s.a));
    CHECK_CUDA(cudaStreamWaitEvent(s.b, done, 0));
    CHECK_CUDA(cudaMemcpyAsync(host.p, x.p, 128, cudaMemcpyDeviceToHost, s.b));
    CHECK_CUDA(cudaStreamSynchronize(s.b));
    CHECK(host.p[31] == 7, "%s: %g", kind, host.p[31]);
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, done));
    CHECK(milliseconds >= 0, "%g ms", milliseconds);
    cudaEventDestroy(start), cudaEventDestroy(done);
  }
}
/* Random streams: what no event orders comes in any order, what an event orders never does; and a
 * wait that is left out shows. */
TEST(random_streams_find_orders) {
  int late = 0, early = 0, skipped = 0;
  for (int seed = 1; seed <= 60; seed++) {
    environment e("CUDAEMU_STREAMS", ("random:" + std::to_string(seed)).c_str());
    for (int kind = 0; kind < 3; kind++) { /* no event, an event, its wait left out */
      environment skip("CUDAEMU_SKIP",
                       kind == 2 ? "cudaStreamWaitEvent:1" : "cudaStreamWaitEvent:9");
      two_streams s;
      cudaEvent_t done;
      device_array<float> x(32, 0);
      pinned host(32);
      CHECK_CUDA(cudaEventCreate(&done));
      CHECK_CUDA(cudaDeviceSynchronize()); /* x is cleared */
      CHECK_CUDA(set(x.p, 32, 7, s.a));
      CHECK_CUDA(cudaEventRecord(done, s.a));
      if (kind) CHECK_CUDA(cudaStreamWaitEvent(s.b, done, 0));
      CHECK_CUDA(cudaMemcpyAsync(host.p, x.p, 128, cudaMemcpyDeviceToHost, s.b));
      CHECK_CUDA(cudaStreamSynchronize(s.b));
      const bool seven = host.p[31] == 7;
      if (kind == 0) (seven ? late : early)++;
      if (kind == 1) CHECK(seven, "seed %d: %g", seed, host.p[31]);
      if (kind == 2) skipped += !seven;
      cudaEventDestroy(done);
    }
  }
  CHECK(late > 5 && early > 5 && skipped > 5, "%d, %d, %d of 60", late, early, skipped);
}
TEST(a_trace_shows_allocations_and_waits) {
  char path[] = "/tmp/perigee-trace-XXXXXX";
  std::string text;
  close(mkstemp(path));
  {
    environment lazy("CUDAEMU_STREAMS", "lazy");
    environment e("CUDAEMU_TRACE", path);
    device_array<float> x(32);
    CHECK_CUDA(set(x.p, 32, 1));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaDeviceSynchronize());
    pinned host(2);
  }
  FILE *f = fopen(path, "r");
  for (int c; f && (c = getc(f)) != EOF;) text += (char)c;
  if (f) fclose(f);
  unlink(path);
  CHECK(text == "cudaMalloc 128\nwait\ncudaHostAlloc 8\ncudaFreeHost\ncudaFree\n", "%s",
        text.c_str());
}
TEST(the_null_stream_waits_for_blocking_streams) {
  environment e("CUDAEMU_STREAMS", "lazy");
  cudaStream_t blocking;
  CHECK_CUDA(cudaStreamCreate(&blocking));
  device_array<float> x(32, 0);
  float got = 0;
  CHECK_CUDA(set(x.p, 32, 9, blocking));
  CHECK_CUDA(cudaMemcpy(&got, x.p, 4, cudaMemcpyDeviceToHost));
  CHECK(got == 9, "%g", got);
  cudaStreamDestroy(blocking);
}

TEST(failures_on_demand) {
  device_array<float> x(32, 0);
  {
    environment e("CUDAEMU_FAIL", "cudaMalloc:2,set_all:2,launch:4");
    void *p[3];
    CHECK(cudaMalloc(&p[0], 8) == cudaSuccess &&
              cudaMalloc(&p[1], 8) == cudaErrorMemoryAllocation &&
              cudaMalloc(&p[2], 8) == cudaSuccess,
          "the second allocation fails");
    CHECK(set(x.p, 1, 1) == cudaSuccess && set(x.p, 1, 1) == cudaErrorLaunchFailure &&
              set(x.p, 1, 1) == cudaSuccess && set(x.p, 1, 1) == cudaErrorLaunchFailure,
          "launches two and four fail");
    cudaFree(p[0]), cudaFree(p[2]);
  }
  environment e("CUDAEMU_FAIL", "execute:1");
  set(x.p, 1, 1);
  CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress, "found at the wait");
  CHECK(cudaMemset(x.p, 0, 4) == cudaErrorIllegalAddress, "and by every later call");
}
TEST(no_device_and_several) {
  int n = -1;
  {
    environment e("CUDAEMU_DEVICES", "0");
    void *p;
    CHECK(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0, "%d", n);
    CHECK(cudaSetDevice(0) == cudaErrorNoDevice && cudaMalloc(&p, 1) == cudaErrorNoDevice, "use");
  }
  environment e("CUDAEMU_DEVICES", "3");
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceCount(&n) == cudaSuccess && n == 3, "%d", n);
  CHECK(cudaSetDevice(3) == cudaErrorInvalidDevice && cudaSetDevice(2) == cudaSuccess, "choice");
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 2));
  CHECK(strstr(properties.name, "2") && properties.warpSize == 32, "%s", properties.name);
  cudaSetDevice(0);
}
TEST(launches_that_a_device_refuses) {
  device_array<float> x(32);
  cudaError_t none = pg_launch(set_all, dim3(0), dim3(32), 0, nullptr, x.p, 1, 0.0f);
  cudaError_t wide = pg_launch(set_all, dim3(1), dim3(1025), 0, nullptr, x.p, 1, 0.0f);
  cudaError_t shared = pg_launch(set_all, dim3(1), dim3(1), 228 << 10, nullptr, x.p, 1, 0.0f);
  CHECK(none == cudaErrorInvalidConfiguration && wide == none && shared == cudaErrorInvalidValue,
        "%d %d %d", none, wide, shared);
  cudaGetLastError();
}

struct view {
  long rows;
  float *data;
};
__global__ void through_struct(view v) {
  v.data[threadIdx.x] = 1;
}
__global__ void half_a_barrier(float *) {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void half_a_shuffle(float *x) {
  if (threadIdx.x % 2) x[0] = __shfl_xor_sync(PG_FULL_MASK, 1.0f, 1);
}
TEST(reports_name_the_mistake) {
  float on_host[32] = {0};
  device_array<float> x(30, 0);
  view bad = {1, on_host}, good = {1, x.p};
  CHECK_CUDA(pg_launch(through_struct, dim3(1), dim3(30), 0, nullptr, good));
  CHECK_REPORT(set(on_host, 32, 1), "kernel set_all: argument 1 holds");
  CHECK_REPORT(pg_launch(through_struct, dim3(1), dim3(1), 0, nullptr, bad), "argument 1 holds");
  CHECK_REPORT(cudaMemcpy(on_host, on_host, 8, cudaMemcpyHostToDevice), "cudaMemcpy: ");
  CHECK_REPORT(cudaMemcpy(x.p, on_host, 124, cudaMemcpyHostToDevice), "which has 120 bytes");
  CHECK_REPORT(cudaFree(on_host), "was not allocated so");
  CHECK_REPORT(
      (pg_launch(half_a_barrier, dim3(1), dim3(64), 0, nullptr, x.p), cudaDeviceSynchronize()),
      "deadlock in kernel half_a_barrier, block (0,0,0) of 64 threads:\n  at "
      "__syncthreads: threads 0-31\n  finished: threads 32-63");
  CHECK_REPORT(
      (pg_launch(half_a_shuffle, dim3(1), dim3(32), 0, nullptr, x.p), cudaDeviceSynchronize()),
      "lanes 0xaaaaaaaa wait for the others of mask 0xffffffff");
}

int main() {
  RUN(memory_is_counted_and_limited);
  RUN(copies_of_every_kind);
  RUN(lazy_streams_run_when_waited_for);
  RUN(events_order_streams);
  RUN(random_streams_find_orders);
  RUN(a_trace_shows_allocations_and_waits);
  RUN(the_null_stream_waits_for_blocking_streams);
  RUN(failures_on_demand);
  RUN(no_device_and_several);
  RUN(launches_that_a_device_refuses);
  RUN(reports_name_the_mistake);
  return unit_report();
}
