/* NumPy's .npy files: one array each. Every size is checked before it is believed: a malformed file
 * is PG_EFORMAT with what is wrong, never a large allocation. */
#ifndef PG_NPY_H
#define PG_NPY_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A new contiguous tensor of the array's shape: F32 from float16, float32, float64 and bfloat16
 * (what ml_dtypes saves: "V2"), I32 from integers of any width that fit and from bool. Format
 * versions 1.0, 2.0 and 3.0, C and Fortran order, little-endian; at most PG_MAX_DIMS dimensions.
 * The file must end with the array. */
int pg_npy_read(pg_context *ctx, const char *path, pg_tensor **out);
/* Write t in C order, version 1.0, and fsync: F32 "<f4", F64 "<f8", I32 "<i4", BF16 "<V2". An
 * existing file is replaced, so callers write to temporary names. */
int pg_npy_write(pg_context *ctx, const char *path, const pg_tensor *t);

#ifdef __cplusplus
}
#endif
#endif
