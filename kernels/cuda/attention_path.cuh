/* attention.cu asks attention_path.cu first; that asks attention.cu what its kernels can do. */
#ifndef PG_CUDA_ATTENTION_PATH_CUH
#define PG_CUDA_ATTENTION_PATH_CUH

#include "cuda.cuh"
#include "cudnn_plugin.h"

/* Attention forward (dout NULL) or backward of whole tensors through cuDNN. 1: queued; 0: the plain
 * kernel has to do it; -1: an error. */
int pg__cuda_cudnn_attention(pg_queue *q, pg_dtype type, const pg_cudnn_tensors &t, int64_t batch,
                             int64_t time, int64_t heads, int64_t head_dim);
/* What the scratch has to hold for cuDNN's attention, in both directions; 0 where it is not taken.
 * -1 where PG_ATTENTION cannot be met. */
int pg__cuda_cudnn_workspace(pg_queue *q, const pg_workload *w, int64_t *bytes);
/* 0 where the plain kernels can take such a call in both directions, whatever its type; -1 and the
 * queue's text where head_dim is beyond them or the GPU's shared memory. */
int pg__cuda_plain_attention(pg_queue *q, int64_t batch, int64_t time, int64_t heads,
                             int64_t head_dim);

#endif
