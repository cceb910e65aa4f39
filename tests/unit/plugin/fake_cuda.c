/* A CUDA plugin without CUDA, for tests of how a context finds and starts one: device 0 starts,
 * others do not exist, and FAKE_CUDA in the environment is a reason to refuse. */
#include "kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>

struct pg_queue {
  int device;
};

static int queue_new(const pg_queue_options *options, pg_queue **out, char *message, size_t size) {
  static pg_queue only;
  const char *why = getenv("FAKE_CUDA");
  *out = NULL;
  if (why) {
    snprintf(message, size, "%s", why);
    return -1;
  }
  if (options->device != 0) {
    snprintf(message, size, "there is no GPU %d, the driver sees 1", options->device);
    return -1;
  }
  *out = &only;
  return 0;
}

static void queue_free(pg_queue *q) {
  (void)q;
}
static const char *queue_message(const pg_queue *q) {
  (void)q;
  return "";
}
static int64_t held(pg_queue *q) {
  (void)q;
  return 0;
}
static int device_info(pg_queue *q, pg_device_info *out) {
  (void)q;
  *out = (pg_device_info){.name = "Fake GPU", .count = 1, .memory_free = 3, .memory_total = 4};
  return 0;
}

__attribute__((visibility("default"))) const pg_kernels *pg_cuda_kernels(void) {
  static pg_kernels table = {.name = "cuda",
                             .queue_new = queue_new,
                             .queue_free = queue_free,
                             .message = queue_message,
                             .held = held,
                             .device_info = device_info};
  return &table;
}
