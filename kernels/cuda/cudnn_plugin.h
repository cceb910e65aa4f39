/* What the CUDA backend asks of its cuDNN plugin, perigee_cudnn.so beside perigee_cuda.so:
 * attention for one part of a call. Whether and how a call is split is decided in
 * attention_path.cu, so that the decisions can be tested without cuDNN. Functions return 0, or -1
 * with one line of text. */
#ifndef PG_CUDNN_PLUGIN_H
#define PG_CUDNN_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PG_CUDNN_PLUGIN "perigee_cudnn.so"

typedef struct pg_cudnn pg_cudnn; /* a cuDNN handle and its graphs by shape, for one queue */

typedef struct pg_cudnn_options {
  int device;             /* already the thread's current one */
  void *stream;           /* cudaStream_t */
  const char *properties; /* tests: plan for the device of this description, without having one */
} pg_cudnn_options;

/* bf16 tensors [batch, time, heads, head_dim] whose positions lie `ld` elements apart, and fp32
 * [batch, heads, time] without gaps. Causal, scale 1/sqrt(head_dim). */
typedef struct pg_cudnn_shape {
  int64_t batch, time, heads, head_dim, ld;
  int32_t backward;
} pg_cudnn_shape;

/* Device memory, 16-byte aligned. Forward writes out and lse; backward reads them and writes the
 * three gradients, the same bits in every run. */
typedef struct pg_cudnn_tensors {
  void *query, *key, *value, *out, *lse, *dout, *dquery, *dkey, *dvalue;
} pg_cudnn_tensors;

typedef struct pg_cudnn_api {
  /* On success the text is "cuDNN 9.19.0". */
  int (*open)(const pg_cudnn_options *options, pg_cudnn **out, char *text, size_t size);
  void (*close)(pg_cudnn *c); /* NULL is legal */
  /* Whether cuDNN has an algorithm for the shape, and the workspace that it takes in bytes. The
   * first call for a shape builds it, which takes up to seconds. */
  int (*plan)(pg_cudnn *c, const pg_cudnn_shape *s, size_t *workspace, char *text, size_t size);
  /* Queue the work. A shape that failed once is refused by `plan` from then on. */
  int (*run)(pg_cudnn *c, const pg_cudnn_shape *s, const pg_cudnn_tensors *t, void *workspace,
             char *text, size_t size);
} pg_cudnn_api;

/* The one symbol that the plugin exports. */
const pg_cudnn_api *pg_cudnn_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
