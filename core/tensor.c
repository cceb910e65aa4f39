/* Tensors: counted storage, strided views, and copies between device and host.
 *
 * Invariant: every element that a tensor's shape and strides address lies inside its storage, so
 * copies below need no further checks. A tensor with a zero in its shape addresses nothing. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t pg_dtype_size(pg_dtype dtype) {
  switch (dtype) {
  case PG_F32:
  case PG_I32: return 4;
  case PG_BF16: return 2;
  case PG_F64: return 8;
  }
  return 0;
}

const char *pg_dtype_name(pg_dtype dtype) {
  switch (dtype) {
  case PG_F32: return "F32";
  case PG_BF16: return "BF16";
  case PG_I32: return "I32";
  case PG_F64: return "F64";
  }
  return "?";
}

const char *pg__shape_text(int ndim, const int64_t *shape, char *text, size_t size) {
  size_t used = 0;
  used += (size_t)snprintf(text, size, "[");
  for (int i = 0; i < ndim && used < size; i++)
    used +=
        (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
  if (used < size) snprintf(text + used, size - used, "]");
  return text;
}

static int check_dims(pg_context *ctx, int ndim, const int64_t *shape) {
  if (ndim < 0 || ndim > PG_MAX_DIMS)
    return pg_fail(ctx, PG_EINVAL, "a tensor of %d dimensions: 0 to %d are allowed", ndim,
                   PG_MAX_DIMS);
  for (int i = 0; i < ndim; i++)
    if (shape[i] < 0)
      return pg_fail(ctx, PG_EINVAL, "size %lld of dimension %d: it must be 0 or more",
                     (long long)shape[i], i);
  return 0;
}

int64_t pg_tensor_elements(const pg_tensor *t) {
  int64_t n = 1;
  for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
  return n;
}

bool pg_tensor_contiguous(const pg_tensor *t) {
  int64_t expected = 1;
  if (pg_tensor_elements(t) == 0) return true;
  for (int i = t->ndim - 1; i >= 0; i--) {
    if (t->shape[i] != 1 && t->stride[i] != expected) return false;
    expected *= t->shape[i];
  }
  return true;
}

static void release_storage(struct pg_storage *storage) {
  if (!storage || --storage->references > 0) return;
  storage->context->live_tensors--;
  if (!storage->lent) pg__release(storage->context, storage->memory, storage->bytes);
  free(storage);
}

int pg__tensor_new_raw(pg_context *ctx, pg_dtype dtype, int ndim, const int64_t *shape,
                       pg_tensor **out) {
  int status;
  pg_tensor *t = NULL;
  struct pg_storage *storage = NULL;
  char text[128];

  *out = NULL;
  PG_TRY(check_dims(ctx, ndim, shape));
  /* Strides come from sizes of at least 1, so the product of those must not overflow either. */
  int64_t bytes = (int64_t)pg_dtype_size(dtype), spread = bytes;
  bool overflow = false;
  for (int i = 0; i < ndim; i++) {
    overflow |= __builtin_mul_overflow(spread, pg__max(shape[i], 1), &spread);
    bytes = overflow ? 0 : bytes * shape[i];
  }
  if (overflow) {
    status = pg_fail(ctx, PG_EINVAL, "a %s tensor of shape %s has more than 2^63 bytes",
                     pg_dtype_name(dtype), pg__shape_text(ndim, shape, text, sizeof text));
    goto fail;
  }
  t = calloc(1, sizeof *t);
  storage = calloc(1, sizeof *storage);
  if (!t || !storage) {
    status = pg_fail(ctx, PG_ENOMEM, "a tensor's description does not fit in memory");
    goto fail;
  }
  snprintf(text, sizeof text, "a %s tensor of shape ", pg_dtype_name(dtype));
  pg__shape_text(ndim, shape, text + strlen(text), sizeof text - strlen(text));
  PG_TRY(pg__alloc(ctx, (size_t)bytes, text, &storage->memory));
  storage->context = ctx;
  storage->bytes = (size_t)bytes;
  storage->references = 1;
  ctx->live_tensors++;
  t->context = ctx;
  t->storage = storage;
  t->data = storage->memory;
  t->dtype = dtype;
  t->ndim = ndim;
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    t->shape[i] = shape[i];
    t->stride[i] = stride;
    stride *= pg__max(shape[i], 1);
  }
  *out = t;
  return 0;

fail:
  if (storage && storage->references)
    release_storage(storage);
  else
    free(storage);
  free(t);
  return status;
}

int pg_tensor_new(pg_context *ctx, pg_dtype dtype, int ndim, const int64_t *shape,
                  pg_tensor **out) {
  int status = pg__tensor_new_raw(ctx, dtype, ndim, shape, out);
  if (status < 0) return status;
  const int64_t bytes = pg_tensor_elements(*out) * (int64_t)pg_dtype_size(dtype);
  if (bytes > 0) PG_LAUNCH(ctx, zero, (*out)->data, (size_t)bytes);
  return 0;
fail:
  pg_tensor_free(*out);
  *out = NULL;
  return status;
}

int pg__tensor_lend(pg_context *ctx, void *data, pg_dtype dtype, int ndim, const int64_t *shape,
                    pg_tensor **out) {
  pg_tensor *t = calloc(1, sizeof *t);
  struct pg_storage *storage = calloc(1, sizeof *storage);
  *out = NULL;
  if (!t || !storage) {
    free(t);
    free(storage);
    return pg_fail(ctx, PG_ENOMEM, "a tensor's description does not fit in memory");
  }
  *t = (pg_tensor){.context = ctx, .storage = storage, .data = data, .dtype = dtype, .ndim = ndim};
  int64_t elements = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    t->shape[i] = shape[i];
    t->stride[i] = elements;
    elements *= shape[i];
  }
  *storage = (struct pg_storage){.context = ctx,
                                 .memory = data,
                                 .bytes = (size_t)elements * pg_dtype_size(dtype),
                                 .references = 1,
                                 .lent = true};
  ctx->live_tensors++;
  *out = t;
  return 0;
}

void pg__tensor_recall(pg_tensor *lent) {
  if (lent) lent->storage->recalled = true;
  pg_tensor_free(lent);
}

int pg_tensor_view(const pg_tensor *t, int64_t offset, int ndim, const int64_t *shape,
                   const int64_t *stride, pg_tensor **out) {
  pg_context *ctx = t->context;
  const int64_t unit = (int64_t)pg_dtype_size(t->dtype);
  const int64_t base = (int64_t)((char *)t->data - (char *)t->storage->memory) / unit;
  const int64_t capacity = (int64_t)t->storage->bytes / unit;
  char text[128];

  *out = NULL;
  const int status = check_dims(ctx, ndim, shape);
  if (status < 0) return status;
  /* First and last element addressed, in elements from the start of the storage. */
  int64_t low, high, span;
  bool empty = false, bad = __builtin_add_overflow(base, offset, &low);
  high = low;
  for (int i = 0; i < ndim && !bad; i++) {
    if (shape[i] == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(shape[i] - 1, stride[i], &span)) {
      bad = true;
    } else {
      bad = span < 0 ? __builtin_add_overflow(low, span, &low)
                     : __builtin_add_overflow(high, span, &high);
    }
  }
  if (empty)
    bad = base + offset < 0 || base + offset > capacity; /* a place, but no element */
  else
    bad = bad || low < 0 || high >= capacity;
  if (bad)
    return pg_fail(ctx, PG_EINVAL,
                   "a view of shape %s at element %lld leaves its storage of %lld elements",
                   pg__shape_text(ndim, shape, text, sizeof text), (long long)(base + offset),
                   (long long)capacity);
  pg_tensor *view = calloc(1, sizeof *view);
  if (!view) return pg_fail(ctx, PG_ENOMEM, "a view does not fit in memory");
  view->context = ctx;
  view->storage = t->storage;
  view->data = (char *)t->data + offset * unit;
  view->dtype = t->dtype;
  view->ndim = ndim;
  for (int i = 0; i < ndim; i++) {
    view->shape[i] = shape[i];
    view->stride[i] = stride[i];
  }
  t->storage->references++;
  *out = view;
  return 0;
}

void pg_tensor_free(pg_tensor *t) {
  if (!t) return;
  release_storage(t->storage);
  free(t);
}

/* ---- copies ---------------------------------------------------------------------------- */
/* A strided tensor as blocks of `run` elements that lie next to each other: the trailing dimensions
 * that are contiguous. The leading `outer` dimensions place the blocks. */
static int64_t contiguous_run(const pg_tensor *t, int *outer) {
  int64_t run = 1;
  int i = t->ndim - 1;
  for (; i >= 0 && (t->shape[i] == 1 || t->stride[i] == run); i--) run *= t->shape[i];
  *outer = i + 1;
  return run;
}

/* Walks the blocks of a tensor in row-major order of its leading `outer` dimensions; `offset` is
 * the element offset of the present block. */
typedef struct walk {
  const pg_tensor *tensor;
  int outer;
  int64_t offset, index[PG_MAX_DIMS];
} walk;

static void walk_next(walk *w) {
  for (int i = w->outer - 1; i >= 0; i--) {
    w->offset += w->tensor->stride[i];
    if (++w->index[i] < w->tensor->shape[i]) return;
    w->offset -= w->index[i] * w->tensor->stride[i];
    w->index[i] = 0;
  }
}

/* Smallest and one past the largest element offset of a tensor with elements. */
static void extent(const pg_tensor *t, int64_t *low, int64_t *high) {
  *low = *high = 0;
  for (int i = 0; i < t->ndim; i++) {
    const int64_t span = (t->shape[i] - 1) * t->stride[i];
    if (span < 0)
      *low += span;
    else
      *high += span;
  }
  ++*high;
}

/* Blocks at least this long are transferred one by one; for shorter ones (a transposed view, a
 * column) the whole extent goes through the host. */
#define BLOCK_BYTES 256

int pg_tensor_read(const pg_tensor *t, void *host) {
  pg_context *ctx = t->context;
  const size_t unit = pg_dtype_size(t->dtype);
  const int64_t elements = pg_tensor_elements(t);
  int status, outer;
  char *all = NULL;
  if (elements == 0) return 0;
  const int64_t run = contiguous_run(t, &outer), blocks = elements / run;
  const size_t block = (size_t)run * unit;
  if (blocks == 1 || block >= BLOCK_BYTES) {
    walk w = {.tensor = t, .outer = outer};
    for (int64_t b = 0; b < blocks; b++, walk_next(&w))
      PG_LAUNCH(ctx, download, (char *)host + (size_t)b * block,
                (const char *)t->data + w.offset * (int64_t)unit, block);
    return 0;
  }
  int64_t low, high;
  extent(t, &low, &high);
  if (!(all = malloc((size_t)(high - low) * unit))) {
    status = pg_fail(ctx, PG_ENOMEM, "reading a strided tensor needs %lld bytes of host memory",
                     (long long)(high - low) * (long long)unit);
    goto fail;
  }
  PG_LAUNCH(ctx, download, all, (const char *)t->data + low * (int64_t)unit,
            (size_t)(high - low) * unit);
  walk w = {.tensor = t, .outer = outer};
  for (int64_t b = 0; b < blocks; b++, walk_next(&w))
    memcpy((char *)host + (size_t)b * block, all + (size_t)(w.offset - low) * unit, block);
  status = 0;
fail:
  free(all);
  return status;
}

static int check_writable(const pg_tensor *t) {
  for (int i = 0; i < t->ndim; i++)
    if (t->stride[i] == 0 && t->shape[i] > 1)
      return pg_fail(t->context, PG_EINVAL,
                     "dimension %d repeats one element %lld times: it cannot be written", i,
                     (long long)t->shape[i]);
  return 0;
}

int pg_tensor_write(pg_tensor *t, const void *host) {
  pg_context *ctx = t->context;
  const size_t unit = pg_dtype_size(t->dtype);
  const int64_t elements = pg_tensor_elements(t);
  int status, outer;
  char *all = NULL;
  if (elements == 0) return 0;
  PG_TRY(check_writable(t));
  const int64_t run = contiguous_run(t, &outer), blocks = elements / run;
  const size_t block = (size_t)run * unit;
  if (blocks == 1 || block >= BLOCK_BYTES) {
    walk w = {.tensor = t, .outer = outer};
    for (int64_t b = 0; b < blocks; b++, walk_next(&w))
      PG_LAUNCH(ctx, upload, (char *)t->data + w.offset * (int64_t)unit,
                (const char *)host + (size_t)b * block, block);
    return 0;
  }
  /* What lies between the elements must stay, so the extent is read, changed and written back. */
  int64_t low, high;
  extent(t, &low, &high);
  char *device = (char *)t->data + low * (int64_t)unit;
  const size_t bytes = (size_t)(high - low) * unit;
  if (!(all = malloc(bytes))) {
    status =
        pg_fail(ctx, PG_ENOMEM, "writing a strided tensor needs %zu bytes of host memory", bytes);
    goto fail;
  }
  PG_LAUNCH(ctx, download, all, device, bytes);
  walk w = {.tensor = t, .outer = outer};
  for (int64_t b = 0; b < blocks; b++, walk_next(&w))
    memcpy(all + (size_t)(w.offset - low) * unit, (const char *)host + (size_t)b * block, block);
  PG_LAUNCH(ctx, upload, device, all, bytes);
  status = 0;
fail:
  free(all);
  return status;
}

bool pg__tensor_overlap(const pg_tensor *a, const pg_tensor *b) {
  if (a->storage != b->storage || !pg_tensor_elements(a) || !pg_tensor_elements(b)) return false;
  int64_t low_a, high_a, low_b, high_b;
  extent(a, &low_a, &high_a);
  extent(b, &low_b, &high_b);
  const char *start = a->storage->memory;
  const int64_t at_a = (const char *)a->data - start, at_b = (const char *)b->data - start;
  const int64_t unit_a = (int64_t)pg_dtype_size(a->dtype),
                unit_b = (int64_t)pg_dtype_size(b->dtype);
  return at_a + low_a * unit_a < at_b + high_b * unit_b &&
         at_b + low_b * unit_b < at_a + high_a * unit_a;
}

bool pg__tensor_same_view(const pg_tensor *a, const pg_tensor *b) {
  if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim) return false;
  for (int i = 0; i < a->ndim; i++)
    if (a->shape[i] != b->shape[i] || (a->shape[i] != 1 && a->stride[i] != b->stride[i]))
      return false;
  return true;
}

/* Through host memory: any type, strides and overlap, to the last bit (element-wise kernels would
 * flush denormals). */
static int copy_by_host(pg_tensor *to, const pg_tensor *from) {
  int status;
  const size_t bytes = (size_t)pg_tensor_elements(from) * pg_dtype_size(from->dtype);
  void *host = malloc(bytes);
  if (!host)
    return pg_fail(to->context, PG_ENOMEM,
                   "copying a strided tensor needs %zu bytes of host memory", bytes);
  PG_TRY(pg_tensor_read(from, host));
  PG_TRY(pg_tensor_write(to, host));
fail:
  free(host);
  return status;
}

int pg_tensor_copy(pg_tensor *to, const pg_tensor *from) {
  pg_context *ctx = to->context;
  char text_to[128], text_from[128];
  int status;
  if (to->dtype != from->dtype || to->ndim != from->ndim ||
      memcmp(to->shape, from->shape, sizeof(int64_t) * (size_t)to->ndim) != 0)
    return pg_fail(ctx, PG_EINVAL, "cannot copy %s %s into %s %s: shape and type must be equal",
                   pg_dtype_name(from->dtype),
                   pg__shape_text(from->ndim, from->shape, text_from, sizeof text_from),
                   pg_dtype_name(to->dtype),
                   pg__shape_text(to->ndim, to->shape, text_to, sizeof text_to));
  if (to->context != from->context)
    return pg_fail(ctx, PG_EINVAL, "cannot copy between tensors of different contexts");
  PG_TRY(check_writable(to));
  const int64_t elements = pg_tensor_elements(to);
  if (elements == 0 || pg__tensor_same_view(to, from)) return 0;
  if (pg__tensor_overlap(to, from)) return copy_by_host(to, from);
  int outer_to, outer_from;
  const int64_t run = pg__min(contiguous_run(to, &outer_to), contiguous_run(from, &outer_from));
  const size_t unit = pg_dtype_size(to->dtype), block = (size_t)run * unit;
  if (run < elements && block < BLOCK_BYTES) return copy_by_host(to, from);
  const int outer = outer_to > outer_from ? outer_to : outer_from;
  walk place = {.tensor = to, .outer = outer}, source = {.tensor = from, .outer = outer};
  for (int64_t b = 0; b < elements / run; b++, walk_next(&place), walk_next(&source))
    PG_LAUNCH(ctx, copy, (char *)to->data + place.offset * (int64_t)unit,
              (const char *)from->data + source.offset * (int64_t)unit, block);
  return 0;
fail:
  return status;
}

int pg_tensor_clone(const pg_tensor *t, pg_tensor **out) {
  int status = pg__tensor_new_raw(t->context, t->dtype, t->ndim, t->shape, out);
  if (status == 0 && (status = pg_tensor_copy(*out, t)) < 0) {
    pg_tensor_free(*out);
    *out = NULL;
  }
  return status;
}

int pg__read_rows(const pg_tensor *t, int64_t first, int64_t count, float *host) {
  pg_tensor *view = NULL;
  int status =
      pg_tensor_view(t, first * t->stride[0], 2, (int64_t[]){count, t->shape[1]}, t->stride, &view);
  if (status == 0) status = pg_tensor_read(view, host);
  pg_tensor_free(view);
  return status;
}
