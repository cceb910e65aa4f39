/* What the emulation's own tests share: device arrays, settings for a scope, and runs of code that
 * has to end the process with a report. */
#ifndef PG_EMU_UNIT_H
#define PG_EMU_UNIT_H

#include <cstdlib>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>
#include "tests/unit/unit.h"

#define CHECK_CUDA(call)                                                                           \
  do {                                                                                             \
    cudaError_t e_ = (call);                                                                       \
    CHECK(e_ == cudaSuccess, "%s", cudaGetErrorName(e_));                                          \
  } while (0)

template <class T> struct device_array {
  T *p = nullptr;
  size_t n;
  explicit device_array(size_t count) : n(count) { cudaMalloc(&p, n * sizeof(T)); }
  explicit device_array(const std::vector<T> &v) : device_array(v.size()) {
    cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice);
  }
  device_array(size_t count, int byte) : device_array(count) { cudaMemset(p, byte, n * sizeof(T)); }
  device_array(const device_array &) = delete;
  ~device_array() { cudaFree(p); }
  std::vector<T> host() const {
    std::vector<T> v(n);
    cudaDeviceSynchronize();
    cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
  }
};

#ifdef PG_CUDAEMU
struct environment { /* one variable, for a scope */
  std::string name, before;
  bool had;
  environment(const char *n, const char *value) : name(n), had(getenv(n)) {
    if (had) before = getenv(n);
    setenv(n, value, 1);
    cudaemu_reload();
  }
  environment(const environment &) = delete;
  ~environment() {
    if (had)
      setenv(name.c_str(), before.c_str(), 1);
    else
      unsetenv(name.c_str());
    cudaemu_reload();
  }
};

/* Runs `body` in a child; its exit status, and what it wrote to standard error. */
template <class F> static inline int in_child(F body, std::string *said) {
  int ends[2], status = 0;
  if (pipe(ends)) return -1;
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    close(ends[0]);
    body();
    fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  char buffer[512];
  said->clear();
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said->append(buffer, (size_t)n);
  close(ends[0]);
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
/* The emulation has to report `words`. */
#define CHECK_REPORT(body, words)                                                                  \
  do {                                                                                             \
    std::string said;                                                                              \
    int status = in_child([&] { body; }, &said);                                                   \
    CHECK(status == 86, "status %d: %s", status, said.c_str());                                    \
    CHECK(said.find(words) != std::string::npos, "said \"%s\"", said.c_str());                     \
  } while (0)
#endif

#endif
