/* Any bytes as a shard: opening, scanning and loading give an error or tokens below the
 * vocabulary, never anything else. */
#include "core/perigee.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static pg_context *ctx;
static char folder[] = "/tmp/perigee-XXXXXX", path[64];

static void clean(void) {
  unlink(path);
  rmdir(folder);
}

__attribute__((visibility("default"))) int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!ctx) {
    if (pg_context_new(&(pg_context_options){.threads = 1}, &ctx, NULL, 0) < 0) abort();
    if (!mkdtemp(folder)) abort();
    snprintf(path, sizeof path, "%s/x_train_1.bin", folder);
    atexit(clean);
  }
  FILE *f = fopen(path, "wb");
  if (!f) abort();
  /* The first byte chooses whether a good header is put before the rest. */
  if (size > 0 && data[0] % 2) {
    int32_t header[256] = {PG_SHARD_MAGIC, 1, (int32_t)((size - 1) / 2)};
    fwrite(header, sizeof header, 1, f);
    fwrite(data + 1, 1, (size - 1) / 2 * 2, f);
  } else if (size > 0) {
    fwrite(data + 1, 1, size - 1, f);
  }
  fclose(f);

  pg_shards *shards = NULL;
  if (pg_shards_open(ctx, folder, "*.bin", &shards) == 0) {
    int32_t largest;
    int64_t at;
    if (pg_shard_scan(ctx, &shards->shards[0], &largest, &at) < 0) abort();
    if (largest < 0 || largest > 65535 || at < 0 || at >= shards->tokens) abort();
  }
  pg_shards_free(shards);
  pg_loader_options o = {.folder = folder,
                         .pattern = "*.bin",
                         .time = 3,
                         .batch = 2,
                         .micro = 1,
                         .world = 1,
                         .vocab = 40000,
                         .seed = 1,
                         .shuffle = true};
  pg_loader *loader = NULL;
  if (pg_loader_open(ctx, &o, &loader) == 0) {
    int32_t inputs[3], targets[3];
    for (int i = 0; i < 6 && pg_loader_next(loader, inputs, targets) == 0; i++)
      for (int k = 0; k < 3; k++)
        if (inputs[k] < 0 || inputs[k] >= 40000 || targets[k] < 0 || targets[k] >= 40000) abort();
  }
  pg_loader_close(loader);
  return 0;
}
