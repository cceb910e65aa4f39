/* Safetensors files (8-byte little-endian header length, JSON header, data), read and written
 * with every length checked: a malformed file is PG_EFORMAT with what is wrong, never a large
 * allocation or a crash. */
#ifndef PG_SAFETENSORS_H
#define PG_SAFETENSORS_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_safetensors pg_safetensors;

typedef struct pg_safetensors_entry {
  const char *name;
  const char *dtype; /* "F32", "BF16", "F16", "I64", … as in the file */
  int ndim;          /* 0 … 8 */
  int64_t shape[8];
  int64_t offset; /* in the file */
  int64_t bytes;
  int member; /* which file of several, from 0 */
} pg_safetensors_entry;

/* Open a file, or a folder as Hugging Face writes one: its model.safetensors, or else all files
 * that its model.safetensors.index.json names, as if they were one (PG_ENOENT without either).
 * Checks the headers: at most 100 MB and within the file, no duplicate or overlapping
 * tensors, shape times type equal to the bytes, the data covered to the file's end without gaps. */
int pg_safetensors_open(pg_context *ctx, const char *path, pg_safetensors **out);
void pg_safetensors_close(pg_safetensors *file);
size_t pg_safetensors_count(const pg_safetensors *file);
const pg_safetensors_entry *pg_safetensors_at(const pg_safetensors *file, size_t index);
const pg_safetensors_entry *pg_safetensors_find(const pg_safetensors *file, const char *name);
/* A string of __metadata__ (of the first file), NULL when absent. */
const char *pg_safetensors_metadata(const pg_safetensors *file, const char *key);
/* Read `count` elements from element `first` as fp32 (F32, BF16, F16 and F64 are converted). */
int pg_safetensors_read_f32(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t first,
                            int64_t count, float *out);
/* Read raw bytes. */
int pg_safetensors_read(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t offset,
                        void *out, int64_t bytes);
/* Read a whole tensor into t: same element count; fp32 conversion when t is F32, any integers that
 * fit (and BOOL) when it is I32, else the type must match. */
int pg_safetensors_read_tensor(pg_safetensors *file, const char *name, pg_tensor *t);

/* Write the named tensors (F32, BF16, I32 or F64) and string metadata (pairs key, value, NULL-
 * terminated; may be NULL) to `path` and fsync it; entries in the given order. Data is streamed
 * through a bounded buffer. An existing file is replaced, so callers write to temporary names. */
typedef struct pg_named_tensor {
  const char *name;
  const pg_tensor
      *tensor; /* NULL without `make`: a vector of `ones` ones in F32 (the unit norm gains) */
  int64_t ones;
  /* Or, with tensor NULL: makes the tensor when its turn comes, freed when it is written. Its type
   * and shape are needed before. */
  int (*make)(const struct pg_named_tensor *item, pg_tensor **out);
  const void *self;
  pg_dtype dtype;
  int ndim;
  int64_t shape[2];
} pg_named_tensor;
int pg_safetensors_write(pg_context *ctx, const char *path, const pg_named_tensor *tensors,
                         size_t count, const char *const *metadata);

#ifdef __cplusplus
}
#endif
#endif
