/* Devices and copies. Copies between pinned and device memory are asynchronous, those of pageable
 * host memory wait, as CUDA documents. */
#include "cudaemu.h"
#include "emu.h"
#include <cstdio>

using namespace emu;
#define ENTER(name, error)                                                                         \
  std::lock_guard<std::recursive_mutex> hold(lock);                                                \
  if (cudaError_t e_ = enter(name, error)) return e_

static bool pageable(const void *p) {
  return !find(p);
}

/* A pointer is what the direction says, or the process ends. */
static void require(const void *p, size_t bytes, bool on_device, const char *name) {
  if (!bytes) return;
  if (on_device && find(p) && !is_device(p))
    cudaemu_die("%s: %p is pinned host memory where device memory is expected", name, p);
  if (on_device || find(p)) require_device(p, bytes, name);
  if (!on_device && is_device(p))
    cudaemu_die("%s: %p is device memory where host memory is expected", name, p);
}

static cudaError_t copy(const char *name, void *to, const void *from, size_t width, size_t height,
                        size_t to_pitch, size_t from_pitch, cudaMemcpyKind kind,
                        cudaStream_t handle, bool wait) {
  if (!width || !height) return cudaSuccess;
  if (height > 1 && (width > to_pitch || width > from_pitch)) return fail(cudaErrorInvalidValue);
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) to_device = is_device(to), from_device = is_device(from);
  require(to, (height - 1) * to_pitch + width, to_device, name);
  require(from, (height - 1) * from_pitch + width, from_device, name);
  cudaError_t error = enqueue(handle, name, [=] {
    device_access open;
    for (size_t row = 0; row < height; row++)
      memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return true;
  });
  if (!error && (wait || pageable(to) || pageable(from))) error = wait_stream(get_stream(handle));
  return error;
}

static cudaError_t fill(const char *name, void *p, int value, size_t bytes, cudaStream_t handle) {
  require(p, bytes, true, name);
  return enqueue(handle, name, [=] {
    device_access open;
    memset(p, value, bytes);
    return true;
  });
}

extern "C" {

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind) {
  ENTER("cudaMemcpy", cudaErrorUnknown);
  return copy("cudaMemcpy", to, from, n, 1, n, n, kind, nullptr, kind != cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind,
                            cudaStream_t s) {
  ENTER("cudaMemcpyAsync", cudaErrorUnknown);
  return copy("cudaMemcpyAsync", to, from, n, 1, n, n, kind, s, false);
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
  ENTER("cudaMemcpy2D", cudaErrorUnknown);
  return copy("cudaMemcpy2D", to, from, width, height, to_pitch, from_pitch, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t s) {
  ENTER("cudaMemcpy2DAsync", cudaErrorUnknown);
  return copy("cudaMemcpy2DAsync", to, from, width, height, to_pitch, from_pitch, kind, s, false);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t s) {
  ENTER("cudaMemcpyPeerAsync", cudaErrorUnknown);
  return copy("cudaMemcpyPeerAsync", to, from, n, 1, n, n, cudaMemcpyDeviceToDevice, s, false);
}
cudaError_t cudaMemset(void *p, int value, size_t n) {
  ENTER("cudaMemset", cudaErrorUnknown);
  return fill("cudaMemset", p, value, n, nullptr);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
  ENTER("cudaMemsetAsync", cudaErrorUnknown);
  return fill("cudaMemsetAsync", p, value, n, s);
}

/* ---- devices: these answer without one --------------------------------------------------------
 */
cudaError_t cudaGetDeviceCount(int *count) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  *count = set().devices;
  if (injected("cudaGetDeviceCount")) return fail(cudaErrorInsufficientDriver);
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int which) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  if (!set().devices) return fail(cudaErrorNoDevice);
  if (injected("cudaSetDevice")) return fail(cudaErrorInitializationError);
  if (which < 0 || which >= set().devices) return fail(cudaErrorInvalidDevice);
  device = which;
  return sticky;
}
cudaError_t cudaGetDevice(int *which) {
  ENTER("cudaGetDevice", cudaErrorUnknown);
  *which = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  *version = set().devices ? CUDART_VERSION : 0;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceReset() {
  return cudaDeviceSynchronize();
}
cudaError_t cudaSetDeviceFlags(unsigned) {
  return cudaSuccess;
}

/* The limits of an H100 or H200, but few multiprocessors, so that grids stay small. */
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int which) {
  ENTER("cudaGetDeviceProperties", cudaErrorUnknown);
  if (which < 0 || which >= set().devices) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Emulated CUDA device %d", which);
  p->totalGlobalMem = set().memory;
  p->major = 9;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerBlockOptin = set().shared;
  p->sharedMemPerMultiprocessor = set().shared + 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerMultiProcessor = 2048;
  p->multiProcessorCount = 4;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->asyncEngineCount = 3;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
  p->pciBusID = which + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int which) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, which)) return error;
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
  case cudaDevAttrWarpSize: *value = p.warpSize; break;
  case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
  case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
  case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
  case cudaDevAttrMemoryClockRate: *value = 2619000; break; /* kHz */
  case cudaDevAttrClockRate: *value = 1980000; break;
  case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
  case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
  default: return fail(cudaErrorNotSupported);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int which) {
  ENTER("cudaDeviceGetPCIBusId", cudaErrorUnknown);
  if (which < 0 || which >= set().devices) return fail(cudaErrorInvalidDevice);
  snprintf(text, (size_t)bytes, "0000:%02x:00.0", which + 1);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
  ENTER("cudaFuncSetAttribute", cudaErrorInvalidValue);
  return cudaSuccess;
}
}
