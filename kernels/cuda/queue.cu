/* Queues: one stream on one device, and the texts of what went wrong.
 *
 * An error that a kernel causes shows up later, at a call that waits; the text then names the work
 * queued last. With PG_CUDA_SYNC=1 in the environment every launch is waited for, and the text
 * names the kernel that failed. */
#include "cuda.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __global__ void probe() {}

int pg_cuda_refuse(pg_queue *q, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(q->message, sizeof q->message, format, arguments);
  va_end(arguments);
  return -1;
}

/* Errors that concern the call itself; all others may come from earlier work. */
static bool immediate(cudaError_t error) {
  return error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue ||
         error == cudaErrorInvalidConfiguration || error == cudaErrorInvalidResourceHandle ||
         error == cudaErrorLaunchOutOfResources || error == cudaErrorNoKernelImageForDevice;
}

int pg_cuda_fail(pg_queue *q, const char *call, cudaError_t error) {
  const int length = (int)strcspn(call + (call[0] == '('), "(,)") + (call[0] == '(');
  cudaGetLastError(); /* so that the next call does not report it again */
  if (immediate(error) || !q->last || q->synchronous)
    return pg_cuda_refuse(q, "%.*s: %s (%s)", length, call, cudaGetErrorString(error),
                          cudaGetErrorName(error));
  return pg_cuda_refuse(q,
                        "%s (%s), found at %.*s; the last kernel queued was %s, an earlier one may "
                        "be the cause: PG_CUDA_SYNC=1 tells",
                        cudaGetErrorString(error), cudaGetErrorName(error), length, call, q->last);
}

int pg_cuda_launched(pg_queue *q, const char *kernel, cudaError_t error) {
  if (kernel[0] == '(') kernel++; /* of the macro's argument, not of the name */
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error == cudaSuccess && q->synchronous) error = cudaStreamSynchronize(q->stream);
  if (error != cudaSuccess) return pg_cuda_fail(q, kernel, error);
  q->last = kernel;
  return 0;
}

/* ---- devices ------------------------------------------------------------------------------- */
/* Of a machine that cannot run the backend: which of driver and device is missing. */
static void explain(char *text, size_t size, cudaError_t error, int count) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaGetLastError();
  if (driver == 0)
    snprintf(text, size, "no NVIDIA driver is loaded on this machine");
  else if (error == cudaErrorInsufficientDriver)
    snprintf(text, size,
             "the NVIDIA driver is too old: it serves CUDA up to %d.%d, this build needs %d.%d",
             driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  else if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    snprintf(text, size, "the NVIDIA driver sees no device%s",
             getenv("CUDA_VISIBLE_DEVICES") ? " that CUDA_VISIBLE_DEVICES admits" : "");
  else
    snprintf(text, size, "CUDA does not start: %s (%s)", cudaGetErrorString(error),
             cudaGetErrorName(error));
}

static int start(pg_queue *q, char *text, size_t size) {
  cudaDeviceProp properties;
  cudaError_t error;
  if ((error = cudaSetDevice(q->device)) != cudaSuccess ||
      (error = cudaGetDeviceProperties(&properties, q->device)) != cudaSuccess ||
      (error = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking)) != cudaSuccess) {
    snprintf(text, size, "device %d does not start: %s (%s)", q->device, cudaGetErrorString(error),
             cudaGetErrorName(error));
    return -1;
  }
  q->multiprocessors = properties.multiProcessorCount;
  q->shared = properties.sharedMemPerBlockOptin;
  if (pg_cuda_launched(q, "probe", pg_launch(probe, dim3(1), dim3(32), 0, q->stream)) < 0 ||
      pg_cuda_synchronize(q) < 0) {
    snprintf(text, size, "this build has no kernels that run on %s (sm_%d%d): %s", properties.name,
             properties.major, properties.minor, q->message);
    return -1;
  }
  q->last = NULL;
  if (pg__cuda_memory_new(q) < 0) {
    snprintf(text, size, "%s", q->message);
    return -1;
  }
  return 0;
}

int pg_cuda_queue_new(const pg_queue_options *options, pg_queue **out, char *message, size_t size) {
  char text[1024] = "";
  const char *synchronous = getenv("PG_CUDA_SYNC");
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  pg_queue *q = NULL;
  *out = NULL;
  if (error != cudaSuccess || count == 0) {
    explain(text, sizeof text, error, count);
  } else if (options->device < 0 || options->device >= count) {
    snprintf(text, sizeof text, "device index %d does not exist: this process sees %d CUDA %s",
             options->device, count, count == 1 ? "device, index 0" : "devices, counted from 0");
  } else if (!(q = (pg_queue *)calloc(1, sizeof *q))) {
    snprintf(text, sizeof text, "no host memory for a queue");
  } else {
    q->device = options->device;
    q->devices = count;
    q->synchronous = synchronous && strcmp(synchronous, "0") != 0;
    if (start(q, text, sizeof text) == 0) {
      *out = q;
      return 0;
    }
  }
  pg_cuda_queue_free(q);
  if (message && size) snprintf(message, size, "%s", text);
  return -1;
}

/* Errors found here have no one left to read them. */
void pg_cuda_queue_free(pg_queue *q) {
  if (!q) return;
  cudaSetDevice(q->device);
  if (q->stream) cudaStreamSynchronize(q->stream);
  pg__cuda_products_free(q);
  pg__cuda_stamps_free(q);
  pg__cuda_attention_free(q);
  pg__cuda_memory_free(q);
  if (q->stream) cudaStreamDestroy(q->stream);
  cudaGetLastError();
  free(q);
}

const char *pg_cuda_message(const pg_queue *q) {
  return q->message;
}

int pg_cuda_synchronize(pg_queue *q) {
  PG_CUDA(q, cudaStreamSynchronize(q->stream));
  return 0;
}
