/* A tensor: a typed, strided view of device memory. The storage is shared and reference-counted;
 * a view keeps it alive. Rows and columns count from 0 here (from 1 in Lua). At most two
 * dimensions carry arithmetic; a vector [n] computes as one row (tensor_ops.h). */
#ifndef PG_TENSOR_H
#define PG_TENSOR_H

#include "../kernels/dtype.h"
#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PG_MAX_DIMS 4

typedef struct pg_tensor {
  /* read-only for users */
  pg_context *context;
  struct pg_storage *storage; /* counted */
  void *data;                 /* device pointer of element 0; the core never dereferences it */
  pg_dtype dtype;
  int ndim; /* 0 … PG_MAX_DIMS; 0 is a scalar of one element */
  int64_t shape[PG_MAX_DIMS];
  int64_t stride[PG_MAX_DIMS]; /* in elements */
} pg_tensor;

/* A new tensor of zeros. Shape entries >= 0. The caller owns it. */
int pg_tensor_new(pg_context *ctx, pg_dtype dtype, int ndim, const int64_t *shape, pg_tensor **out);
/* Another view of the same storage: `ndim`, `shape`, `stride` as given, starting `offset` elements
 * after t's element 0; refused (PG_EINVAL) when it would leave the storage. */
int pg_tensor_view(const pg_tensor *t, int64_t offset, int ndim, const int64_t *shape,
                   const int64_t *stride, pg_tensor **out);
/* NULL is legal. */
void pg_tensor_free(pg_tensor *t);

int64_t pg_tensor_elements(const pg_tensor *t);
bool pg_tensor_contiguous(const pg_tensor *t);
size_t pg_dtype_size(pg_dtype dtype);
const char *pg_dtype_name(pg_dtype dtype); /* "F32", as safetensors spells it */

/* Copy all elements to / from host memory in row-major order, in the tensor's own type.
 * Strided tensors are supported. */
int pg_tensor_read(const pg_tensor *t, void *host);
int pg_tensor_write(pg_tensor *t, const void *host);
/* to <- from; same shape and type. */
int pg_tensor_copy(pg_tensor *to, const pg_tensor *from);
/* A new contiguous tensor with the same contents. */
int pg_tensor_clone(const pg_tensor *t, pg_tensor **out);

#ifdef __cplusplus
}
#endif
#endif
