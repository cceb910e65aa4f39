/* The environment, counted failures, last errors, and how mistakes end the process. */
#include "cudaemu.h"
#include "emu.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace emu {

struct failure {
  std::string name;
  long after; /* calls until the one that fails; 0: it has failed */
};

std::recursive_mutex lock;
thread_local int device;
cudaError_t sticky = cudaSuccess;
static thread_local cudaError_t last_error = cudaSuccess;
static settings now;
static std::vector<failure> *failures, *skips; /* never freed: used while the process ends */
static int trace_file = -1;
static uint64_t random_state;
static bool read;

static const char *text(const char *name, const char *standard) {
  const char *value = getenv(name);
  return value && *value ? value : standard;
}

/* NAME:N[,NAME:N...] */
static void read_list(const char *variable, std::vector<failure> **to) {
  if (!*to) *to = new std::vector<failure>;
  (*to)->clear();
  std::string list = text(variable, "");
  for (size_t at = 0, end; at < list.size(); at = end + 1) {
    end = std::min(list.find(',', at), list.size());
    size_t colon = list.find(':', at);
    if (colon >= end) cudaemu_die("%s=%s; NAME:N[,NAME:N...]", variable, list.c_str());
    (*to)->push_back({list.substr(at, colon - at), atol(list.c_str() + colon + 1)});
  }
}

static size_t bytes(const char *variable, const char *standard) {
  char *unit;
  const size_t count = strtoull(text(variable, standard), &unit, 10);
  return count << (*unit == 'g' ? 30 : *unit == 'm' ? 20 : *unit == 'k' ? 10 : 0);
}

static void read_settings() {
  read = true;
  std::string order = text("CUDAEMU_ORDER", "forward");
  now.direction = FORWARD;
  if (order == "reverse")
    now.direction = REVERSE;
  else if (order.rfind("random:", 0) == 0)
    now.direction = RANDOM, now.seed = strtoull(order.c_str() + 7, nullptr, 10);
  else if (order != "forward")
    cudaemu_die("CUDAEMU_ORDER=%s; forward, reverse or random:SEED", order.c_str());
  random_state = now.seed;
  std::string streams = text("CUDAEMU_STREAMS", "eager");
  now.shuffled = streams.rfind("random:", 0) == 0;
  now.lazy = now.shuffled || streams == "lazy";
  if (now.shuffled)
    random_state += strtoull(streams.c_str() + 7, nullptr, 10);
  else if (!now.lazy && streams != "eager")
    cudaemu_die("CUDAEMU_STREAMS=%s; eager, lazy or random:SEED", streams.c_str());
  now.unordered = text("CUDAEMU_BLOCKS", "ordered") == std::string("unordered");
  now.guard = atoi(text("CUDAEMU_GUARD", "0"));
  now.devices = atoi(text("CUDAEMU_DEVICES", "1"));
  now.nccl_timeout = atof(text("CUDAEMU_NCCL_TIMEOUT", "60"));
  now.memory = bytes("CUDAEMU_MEMORY", "16g");
  now.shared = bytes("CUDAEMU_SHARED", "227k");
  read_list("CUDAEMU_FAIL", &failures);
  read_list("CUDAEMU_SKIP", &skips);
  if (trace_file >= 0) close(trace_file);
  trace_file = -1;
  const char *path = text("CUDAEMU_TRACE", "");
  if (*path && (trace_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0)
    cudaemu_die("CUDAEMU_TRACE=%s does not open", path);
}

const settings &set() {
  if (!read) read_settings();
  return now;
}

static bool counted(std::vector<failure> *list, const char *name) {
  for (failure &f : *list)
    if (f.after > 0 && f.name == name && --f.after == 0) return true;
  return false;
}
bool injected(const char *name) {
  set();
  return counted(failures, name);
}
bool skipped(const char *name) {
  set();
  return counted(skips, name);
}

void trace(const char *what, long long bytes) {
  char line[80];
  set();
  if (trace_file < 0) return;
  const int n = bytes < 0 ? snprintf(line, sizeof line, "%s\n", what)
                          : snprintf(line, sizeof line, "%s %lld\n", what, bytes);
  if (write(trace_file, line, (size_t)n) != n) cudaemu_die("CUDAEMU_TRACE cannot be written");
}

uint64_t random_bits() { /* splitmix64 */
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void arrange(uint16_t *list, unsigned n) {
  if (now.direction == FORWARD) return;
  for (unsigned i = 0; i + 1 < n; i++) {
    unsigned j = now.direction == RANDOM ? i + (unsigned)(random_bits() % (n - i)) : n - 1 - i;
    if (now.direction == REVERSE && j <= i) return;
    uint16_t t = list[i];
    list[i] = list[j], list[j] = t;
  }
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t enter(const char *name, cudaError_t injected_error) {
  if (set().devices == 0) return fail(cudaErrorNoDevice);
  if (injected(name)) return fail(injected_error);
  if (sticky != cudaSuccess) return fail(sticky);
  if (device < 0 || device >= set().devices) return fail(cudaErrorInvalidDevice);
  return cudaSuccess;
}

} // namespace emu

using namespace emu;

extern "C" {

void cudaemu_reload() {
  std::lock_guard<std::recursive_mutex> hold(lock);
  sticky = last_error = cudaSuccess;
  read_settings();
}

void cudaemu_die(const char *format, ...) {
  const char *place = where();
  char message[2048];
  int n = snprintf(message, sizeof message, "cudaemu: %s%s", place, *place ? ": " : "");
  va_list list;
  va_start(list, format);
  n += vsnprintf(message + n, sizeof message - (size_t)n - 1, format, list);
  va_end(list);
  n = std::min(n, (int)sizeof message - 2);
  message[n++] = '\n';
  fflush(stdout);
  if (write(2, message, (size_t)n) < 0) _exit(86);
  _exit(86);
}

cudaError_t cudaGetLastError() {
  if (sticky != cudaSuccess) return sticky;
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return sticky != cudaSuccess ? sticky : last_error;
}

#define ERRORS(X)                                                                                  \
  X(cudaSuccess, "no error")                                                                       \
  X(cudaErrorInvalidValue, "invalid argument")                                                     \
  X(cudaErrorMemoryAllocation, "out of memory")                                                    \
  X(cudaErrorInitializationError, "initialization error")                                          \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")                               \
  X(cudaErrorInvalidDevicePointer, "invalid device pointer")                                       \
  X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")   \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                       \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                              \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                     \
  X(cudaErrorNotReady, "device not ready")                                                         \
  X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                           \
  X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                      \
  X(cudaErrorLaunchFailure, "unspecified launch failure")                                          \
  X(cudaErrorNotSupported, "operation not supported")                                              \
  X(cudaErrorUnknown, "unknown error")

const char *cudaGetErrorName(cudaError_t error) {
#define NAME(code, words)                                                                          \
  if (error == code) return #code;
  ERRORS(NAME)
  return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
#define WORDS(code, words)                                                                         \
  if (error == code) return words;
  ERRORS(WORDS)
  return "unrecognized error code";
}
}
