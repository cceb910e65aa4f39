#include "fake_cudnn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static fake_cudnn_log seen;
EXPORT fake_cudnn_log *fake_cudnn(void) {
  return &seen;
}

static int fails(const char *what, char *text, size_t size) {
  const char *wanted = getenv("FAKE_CUDNN");
  if (!wanted || strcmp(wanted, what) != 0) return 0;
  snprintf(text, size, "no luck with %s", what);
  return -1;
}

static int open_fake(const pg_cudnn_options *options, pg_cudnn **out, char *text, size_t size) {
  seen.opened++;
  *out = NULL;
  if (!options->stream) return -1;
  if (fails("open", text, size) < 0) return -1;
  *out = (pg_cudnn *)&seen;
  snprintf(text, size, "cuDNN 0.0.1");
  return 0;
}
static void close_fake(pg_cudnn *c) {
  (void)c;
  seen.closed++;
}
static int plan_fake(pg_cudnn *c, const pg_cudnn_shape *s, size_t *workspace, char *text,
                     size_t size) {
  (void)c;
  seen.planned++;
  if (fails(s->backward ? "plan backward" : "plan forward", text, size) < 0) return -1;
  *workspace = s->backward ? FAKE_WORKSPACE * (size_t)(s->batch * s->heads) : 0;
  return 0;
}
static int run_fake(pg_cudnn *c, const pg_cudnn_shape *s, const pg_cudnn_tensors *t,
                    void *workspace, char *text, size_t size) {
  (void)c;
  if (fails("run", text, size) < 0) return -1;
  if (seen.ran == (int)(sizeof seen.runs / sizeof *seen.runs)) abort();
  seen.runs[seen.ran].shape = *s;
  seen.runs[seen.ran].tensors = *t;
  seen.runs[seen.ran++].workspace = workspace;
  return 0;
}

EXPORT const pg_cudnn_api *pg_cudnn_plugin(void) {
  static const pg_cudnn_api api = {open_fake, close_fake, plan_fake, run_fake};
  return &api;
}
