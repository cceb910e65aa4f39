/* Fuzzes the .npy reader: any bytes either are refused with a message or become a tensor, which can
 * be written and read again to the same shape and type. */
#include "core/npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define REQUIRE(condition)                                                                         \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static pg_context *ctx;
  static int fd = -1, copy = -1;
  char path[64], path_copy[64];
  pg_tensor *t, *again;
  if (!ctx) {
    const pg_context_options options = {.threads = 1};
    REQUIRE(pg_context_new(&options, &ctx, NULL, 0) == 0);
    REQUIRE((fd = memfd_create("fuzz", 0)) >= 0 && (copy = memfd_create("copy", 0)) >= 0);
  }
  REQUIRE(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  snprintf(path_copy, sizeof path_copy, "/proc/self/fd/%d", copy);
  const int status = pg_npy_read(ctx, path, &t);
  REQUIRE(status == 0 || ((status == PG_EFORMAT || status == PG_EUNSUPPORTED) && !t &&
                          pg_context_message(ctx)[0]));
  if (status == 0) {
    REQUIRE(pg_tensor_elements(t) <= (int64_t)size && pg_tensor_contiguous(t));
    REQUIRE(pg_npy_write(ctx, path_copy, t) == 0 && pg_npy_read(ctx, path_copy, &again) == 0);
    REQUIRE(again->ndim == t->ndim && again->dtype == t->dtype &&
            memcmp(again->shape, t->shape, sizeof t->shape) == 0);
    pg_tensor_free(again);
    pg_tensor_free(t);
  }
  REQUIRE(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0);
  return 0;
}
