/* Fuzzes the safetensors reader: any bytes either are refused with a message or open, and then
 * every tensor reads within the file, whole and in parts, and survives being written again. */
#include "core/safetensors.h"

#include <fcntl.h>
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

static void check_entry(pg_context *ctx, pg_safetensors *file, const pg_safetensors_entry *e,
                        size_t size) {
  REQUIRE(e->ndim >= 0 && e->ndim <= 8 && e->offset >= 8 && e->bytes >= 0);
  REQUIRE((uint64_t)e->offset + (uint64_t)e->bytes <= size);
  REQUIRE(pg_safetensors_find(file, e->name) == e);
  char *bytes = malloc((size_t)e->bytes + 1);
  float *numbers = malloc(((size_t)e->bytes / 2 + 1) * sizeof *numbers);
  REQUIRE(bytes && numbers);
  REQUIRE(pg_safetensors_read(file, e, 0, bytes, e->bytes) == 0);
  REQUIRE(pg_safetensors_read(file, e, 1, bytes, e->bytes) == PG_EINVAL);
  int64_t elements = 1;
  for (int i = 0; i < e->ndim; i++) elements = e->bytes ? elements * e->shape[i] : 0;
  const int status = pg_safetensors_read_f32(file, e, 0, elements, numbers);
  REQUIRE(status == 0 || (status == PG_EFORMAT && strstr(pg_context_message(ctx), e->dtype)));
  if (status == 0) {
    const int64_t shape[1] = {elements};
    pg_tensor *t;
    REQUIRE(pg_safetensors_read_f32(file, e, 1, elements, numbers) == PG_EINVAL);
    REQUIRE(pg_tensor_new(ctx, PG_F32, 1, shape, &t) == 0);
    REQUIRE(pg_safetensors_read_tensor(file, e->name, t) == 0);
    const pg_named_tensor item[] = {{.name = e->name, .tensor = t}};
    REQUIRE(pg_safetensors_write(ctx, "/dev/null", item, 1, NULL) == 0 ||
            strcmp(e->name, "__metadata__") == 0);
    pg_tensor_free(t);
  }
  free(bytes);
  free(numbers);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static pg_context *ctx;
  static int fd = -1;
  char path[64];
  pg_safetensors *file;
  if (!ctx) {
    const pg_context_options options = {.threads = 1};
    REQUIRE(pg_context_new(&options, &ctx, NULL, 0) == 0);
    REQUIRE((fd = memfd_create("fuzz", 0)) >= 0);
  }
  REQUIRE(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int status = pg_safetensors_open(ctx, path, &file);
  REQUIRE(status == 0 || (status == PG_EFORMAT && !file && pg_context_message(ctx)[0]));
  if (status == 0) {
    for (size_t i = 0; i < pg_safetensors_count(file); i++)
      check_entry(ctx, file, pg_safetensors_at(file, i), size);
    pg_safetensors_metadata(file, "format");
    pg_safetensors_close(file);
  }
  REQUIRE(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0);
  return 0;
}
