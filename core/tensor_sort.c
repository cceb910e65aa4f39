/* What goes through host memory: sorting, the k largest, other types in fp32. Rows are gathered on
 * the device. */
#include "internal.h"
#include "numbers.h"
#include "tensor_ops.h"

#include <stdlib.h>
#include <string.h>

/* Unsigned numbers in the order of the floats: -0 as 0, NaN above everything. */
static uint32_t order_key(float x) {
  uint32_t bits;
  if (x != x) return UINT32_MAX;
  if (x == 0) x = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

typedef struct item {
  uint32_t key, index;
} item;

/* Stable: four passes of 8 bits. The result is in `items` again. */
static void sort_items(item *items, item *other, int64_t n) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t place[257] = {0};
    for (int64_t i = 0; i < n; i++) place[(items[i].key >> shift & 255) + 1]++;
    for (int digit = 0; digit < 256; digit++) place[digit + 1] += place[digit];
    for (int64_t i = 0; i < n; i++) other[place[items[i].key >> shift & 255]++] = items[i];
    item *swap = items;
    items = other;
    other = swap;
  }
}

int pg_tensor_sort(const pg_tensor *a, int64_t k, bool descending, pg_tensor **values,
                   pg_tensor **indices) {
  pg_context *ctx = a->context;
  const int64_t columns = a->ndim ? a->shape[a->ndim - 1] : 1;
  const int64_t rows = a->ndim == 2 ? a->shape[0] : 1;
  const int64_t shape[2] = {a->ndim == 2 ? rows : k, k};
  char text[128];
  float *from = NULL, *to = NULL, *at = NULL;
  item *items = NULL;
  int status;

  *values = *indices = NULL;
  PG_TRY(pg__tensor_check_f32("sort", a));
  if (k < 0 || k > columns || columns > 1 << 24) {
    status = pg_fail(ctx, columns > 1 << 24 ? PG_EUNSUPPORTED : PG_EINVAL,
                     "sort: %lld of each %lld elements (shape %s); at most all of them and %d, up "
                     "to which fp32 holds indices exactly",
                     (long long)k, (long long)columns,
                     pg__shape_text(a->ndim, a->shape, text, sizeof text), 1 << 24);
    goto fail;
  }
  const size_t count = (size_t)(rows * columns), kept = (size_t)(rows * k);
  from = malloc(count * sizeof *from + 1);
  to = malloc(kept * sizeof *to + 1);
  at = malloc(kept * sizeof *at + 1);
  items = malloc(2 * (size_t)columns * sizeof *items + 1);
  if (!from || !to || !at || !items) {
    status = pg_fail(ctx, PG_ENOMEM, "sort: shape %s does not fit in host memory",
                     pg__shape_text(a->ndim, a->shape, text, sizeof text));
    goto fail;
  }
  PG_TRY(pg_tensor_read(a, from));
  for (int64_t i = 0; i < rows; i++) {
    const float *row = from + i * columns;
    for (int64_t j = 0; j < columns; j++) {
      const uint32_t key = order_key(row[j]);
      items[j] = (item){descending ? ~key : key, (uint32_t)j};
    }
    sort_items(items, items + columns, columns);
    for (int64_t j = 0; j < k; j++) {
      to[i * k + j] = row[items[j].index];
      at[i * k + j] = (float)items[j].index;
    }
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "sorting was cancelled");
      goto fail;
    }
  }
  PG_TRY(pg__tensor_new_raw(ctx, PG_F32, a->ndim, shape, values));
  PG_TRY(pg__tensor_new_raw(ctx, PG_F32, a->ndim, shape, indices));
  PG_TRY(pg_tensor_write(*values, to));
  PG_TRY(pg_tensor_write(*indices, at));
fail:
  free(from);
  free(to);
  free(at);
  free(items);
  if (status < 0) {
    pg_tensor_free(*values);
    pg_tensor_free(*indices);
    *values = *indices = NULL;
  }
  return status;
}

int pg_tensor_gather_rows(const pg_tensor *a, const int32_t *rows, int64_t n, pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *clone = NULL, *list = NULL, *made = NULL;
  char text[128];
  int status;

  *result = NULL;
  PG_TRY(pg__tensor_check_f32("index_select", a));
  if (a->ndim == 0) {
    status = pg_fail(ctx, PG_EINVAL, "index_select: a scalar has no rows");
    goto fail;
  }
  for (int64_t i = 0; i < n; i++)
    if (rows[i] < 0 || rows[i] >= a->shape[0]) {
      status = pg_fail(ctx, PG_EINVAL, "index_select: row %d of shape %s, counted from 0",
                       (int)rows[i], pg__shape_text(a->ndim, a->shape, text, sizeof text));
      goto fail;
    }
  const int64_t columns = a->ndim == 2 ? a->shape[1] : 1, shape[2] = {n, columns};
  PG_TRY(pg__tensor_new_raw(ctx, PG_F32, a->ndim, shape, &made));
  if (n > 0 && columns > 0) {
    if (!pg_tensor_contiguous(a)) {
      PG_TRY(pg_tensor_clone(a, &clone));
      a = clone;
    }
    PG_TRY(pg__tensor_new_raw(ctx, PG_I32, 1, &n, &list));
    PG_TRY(pg_tensor_write(list, rows));
    PG_LAUNCH(ctx, embedding_forward, PG_F32, list->data, n, a->data, columns, made->data);
  }
  *result = made;
  made = NULL;
fail:
  pg_tensor_free(clone);
  pg_tensor_free(list);
  pg_tensor_free(made);
  return status;
}

int pg_tensor_float(const pg_tensor *t, pg_tensor **result) {
  pg_context *ctx = t->context;
  const int64_t n = pg_tensor_elements(t);
  float *numbers = NULL;
  void *raw = NULL;
  int status;

  *result = NULL;
  if (t->dtype == PG_F32) return pg_tensor_clone(t, result);
  raw = malloc((size_t)n * pg_dtype_size(t->dtype) + 1);
  numbers = malloc((size_t)n * sizeof *numbers + 1);
  if (!raw || !numbers) {
    status = pg_fail(ctx, PG_ENOMEM, "%lld numbers do not fit in host memory", (long long)n);
    goto fail;
  }
  PG_TRY(pg_tensor_read(t, raw));
  if (t->dtype == PG_I32)
    for (int64_t i = 0; i < n; i++) numbers[i] = (float)((const int32_t *)raw)[i];
  else
    pg__numbers_f32(t->dtype == PG_BF16 ? PG__BF16 : PG__F64, raw, n, numbers);
  PG_TRY(pg__tensor_new_raw(ctx, PG_F32, t->ndim, t->shape, result));
  PG_TRY(pg_tensor_write(*result, numbers));
fail:
  free(raw);
  free(numbers);
  if (status < 0) {
    pg_tensor_free(*result);
    *result = NULL;
  }
  return status;
}
