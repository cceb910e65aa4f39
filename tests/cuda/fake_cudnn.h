/* The cuDNN plugin of cuda_path_test.c: it computes nothing, but remembers what it was asked. */
#ifndef PG_FAKE_CUDNN_H
#define PG_FAKE_CUDNN_H

#include "kernels/cuda/cudnn_plugin.h"

typedef struct fake_cudnn_log {
  int opened, closed, planned, ran;
  struct {
    pg_cudnn_shape shape;
    pg_cudnn_tensors tensors;
    void *workspace;
  } runs[64];
} fake_cudnn_log;

/* FAKE_CUDNN in the environment makes it fail: "open", "plan", "plan backward" or "run". */
fake_cudnn_log *fake_cudnn(void);
/* Workspace of one head of one sequence. */
#define FAKE_WORKSPACE ((size_t)90 << 20)

#endif
