/* Any bytes as a tokenizer.json, as vocab.json with merges.txt, and as text. A tokenizer that loads
 * encodes the input so that its tokens give the input back. */
#include "core/tokenizer_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pg_context *ctx;

static void check(pg_tokenizer *t, const char *text, size_t size) {
  int32_t *ids;
  int64_t count;
  for (int special = 0; special < 2; special++) {
    size_t at = 0;
    if (pg_tokenizer_encode(t, text, size, special, &ids, &count) < 0) abort();
    for (int64_t i = 0; i < count; i++) {
      size_t length;
      const char *bytes = pg_tokenizer_bytes(t, ids[i], &length);
      if (!bytes || length > size - at || memcmp(bytes, text + at, length) != 0) abort();
      at += length;
    }
    if (at != size) abort();
    free(ids);
  }
}

/* A good file around the input as its list of merges, so that the fuzzer gets past the bytes. */
static char *wrap(const char *merges, size_t size) {
  char *text = malloc(size + 8192), *to = text;
  to += sprintf(to, "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                    "\"model\":{\"type\":\"BPE\",\"vocab\":{");
  for (int i = 0; i < 256; i++)
    to += sprintf(to, "%s\"\\u%04x\":%d", i ? "," : "", pg__code_point_of((uint8_t)i), i);
  to += sprintf(to, ",\"ab\":256,\"abc\":257,\"bc\":258,\"abab\":259},\"merges\":");
  memcpy(to, merges, size);
  strcpy(to + size, "}}");
  return text;
}

__attribute__((visibility("default"))) int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!ctx && pg_context_new(&(pg_context_options){.threads = 1}, &ctx, NULL, 0) < 0) abort();
  const char *input = (const char *)data;
  pg_tokenizer *t = NULL;
  if (pg__tokenizer_parse(ctx, "input", input, size, &t) == 0) check(t, input, size);
  pg_tokenizer_free(t);
  char *text = wrap(input, size);
  if (pg__tokenizer_parse(ctx, "wrapped", text, strlen(text), &t) == 0) check(t, input, size);
  pg_tokenizer_free(t);
  free(text);
  size_t half = size / 2;
  if (pg__tokenizer_parse_pair(ctx, "vocab", input, half, "merges", input + half, size - half,
                               &t) == 0)
    check(t, input, size);
  pg_tokenizer_free(t);
  pg_text document = {input, size};
  if (pg_tokenizer_train(ctx, &document, 1, 280, NULL, NULL, &t) < 0) abort();
  check(t, input, size);
  pg_tokenizer_free(t);
  return 0;
}
