/* Tensors: storage counts, views and their bounds, copies of strided and empty tensors. */
#include "core/tensor.h"
#include "unit.h"

static pg_context *ctx;

/* A new tensor [rows, columns] with elements 0, 1, 2, … */
static pg_tensor *counted(int64_t rows, int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  pg_tensor *t;
  float *values = malloc((size_t)(rows * columns) * sizeof *values + 1);
  for (int64_t i = 0; i < rows * columns; i++) values[i] = (float)i;
  if (pg_tensor_new(ctx, PG_F32, 2, shape, &t) < 0 || pg_tensor_write(t, values) < 0) abort();
  free(values);
  return t;
}

static pg_tensor *view(const pg_tensor *t, int64_t offset, int ndim, int64_t s0, int64_t s1,
                       int64_t d0, int64_t d1) {
  const int64_t shape[2] = {s0, s1}, stride[2] = {d0, d1};
  pg_tensor *out;
  if (pg_tensor_view(t, offset, ndim, shape, stride, &out) < 0) return NULL;
  return out;
}

static float at(const pg_tensor *t, int64_t i) {
  float *values = calloc((size_t)pg_tensor_elements(t) + 1, sizeof *values);
  CHECK(pg_tensor_read(t, values) == 0, "%s", pg_context_message(ctx));
  const float x = values[i];
  free(values);
  return x;
}

/* Allocations that cannot succeed are asked for; under AddressSanitizer they shall return NULL. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) {
  return "allocator_may_return_null=1";
}

TEST(new_tensors_are_zero) {
  const int64_t shape[4] = {2, 3, 4, 5};
  for (int ndim = 0; ndim <= 4; ndim++)
    for (int type = PG_F32; type <= PG_F64; type++) {
      pg_tensor *t;
      CHECK(pg_tensor_new(ctx, (pg_dtype)type, ndim, shape, &t) == 0);
      const int64_t n = pg_tensor_elements(t);
      const int64_t want[5] = {1, 2, 6, 24, 120};
      CHECK(n == want[ndim] && pg_tensor_contiguous(t));
      char host[120 * 8], zero[120 * 8] = {0};
      const size_t bytes = (size_t)n * pg_dtype_size((pg_dtype)type);
      memset(host, 7, sizeof host);
      CHECK(pg_tensor_read(t, host) == 0 && memcmp(host, zero, bytes) == 0);
      CHECK(host[sizeof host - 1] == 7 || bytes == sizeof host, "wrote past the elements");
      CHECK(pg_context_bytes(ctx) == (int64_t)bytes);
      pg_tensor_free(t);
    }
  CHECK(pg_dtype_size(PG_BF16) == 2 && strcmp(pg_dtype_name(PG_BF16), "BF16") == 0);
  CHECK(pg_dtype_size(PG_F64) == 8 && strcmp(pg_dtype_name(PG_I32), "I32") == 0);
}

TEST(refused_shapes) {
  pg_tensor *t = (pg_tensor *)&t;
  const int64_t negative[2] = {3, -1}, huge[2] = {(int64_t)1 << 32, (int64_t)1 << 32};
  const int64_t odd[3] = {(int64_t)1 << 62, 4, 0}, five[5] = {1, 1, 1, 1, 1};
  const int64_t large[1] = {(int64_t)1 << 58};
  CHECK(pg_tensor_new(ctx, PG_F32, 2, negative, &t) == PG_EINVAL && !t);
  CHECK(strstr(pg_context_message(ctx), "-1"), "%s", pg_context_message(ctx));
  CHECK(pg_tensor_new(ctx, PG_F32, 2, huge, &t) == PG_EINVAL && !t);
  CHECK(strstr(pg_context_message(ctx), "[4294967296, 4294967296]"), "%s", pg_context_message(ctx));
  CHECK(pg_tensor_new(ctx, PG_F32, 3, odd, &t) == PG_EINVAL, "strides would overflow");
  CHECK(pg_tensor_new(ctx, PG_F32, 5, five, &t) == PG_EINVAL);
  CHECK(pg_tensor_new(ctx, PG_F32, -1, five, &t) == PG_EINVAL);
  CHECK(pg_tensor_new(ctx, PG_F32, 1, large, &t) == PG_ENOMEM && !t);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0);
}

TEST(views_share_and_keep_their_storage) {
  pg_tensor *t = counted(3, 4);
  pg_tensor *row = view(t, 4, 1, 4, 0, 1, 0), *flip = view(t, 0, 2, 4, 3, 1, 4);
  CHECK(pg_context_live_tensors(ctx) == 1 && pg_context_bytes(ctx) == 48);
  CHECK(at(row, 0) == 4 && at(row, 3) == 7);
  CHECK(at(flip, 1) == 4 && at(flip, 3) == 1, "the transpose");
  CHECK(!pg_tensor_contiguous(flip) && pg_tensor_contiguous(row));
  const float values[4] = {-1, -2, -3, -4};
  CHECK(pg_tensor_write(row, values) == 0);
  CHECK(at(t, 5) == -2 && at(flip, 4) == -2, "seen through every view");
  pg_tensor_free(t);
  CHECK(pg_context_live_tensors(ctx) == 1, "the views keep it");
  CHECK(at(row, 3) == -4);
  pg_tensor *inner = view(row, 1, 1, 2, 0, 2, 0);
  pg_tensor_free(row);
  pg_tensor_free(flip);
  CHECK(at(inner, 0) == -2 && at(inner, 1) == -4, "a view of a view");
  pg_tensor_free(inner);
  pg_tensor_free(NULL);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0);
}

TEST(views_stay_inside) {
  pg_tensor *t = counted(3, 4), *v;
  CHECK(!view(t, 0, 1, 13, 0, 1, 0), "one too many");
  CHECK(strstr(pg_context_message(ctx), "[13]"), "%s", pg_context_message(ctx));
  CHECK(!view(t, 1, 1, 12, 0, 1, 0));
  CHECK(!view(t, -1, 1, 2, 0, 1, 0));
  CHECK(!view(t, 0, 1, 2, 0, -1, 0), "a negative stride below the start");
  CHECK(!view(t, 0, 2, 3, 4, 5, 1));
  CHECK(!view(t, INT64_MAX, 1, 2, 0, 1, 0));
  CHECK(!view(t, 2, 1, INT64_MAX, 0, INT64_MAX, 0), "offsets overflow");
  CHECK(!view(t, 0, 2, INT64_MAX, 2, 1, INT64_MAX));
  CHECK(!view(t, 0, 1, -1, 0, 1, 0));
  CHECK(!view(t, 13, 1, 0, 0, 1, 0), "an empty view beyond the end");
  CHECK((v = view(t, 12, 1, 0, 0, 1, 0)) != NULL, "an empty view at the end");
  pg_tensor_free(v);
  CHECK((v = view(t, 11, 1, 12, 0, -1, 0)) != NULL, "backwards");
  CHECK(at(v, 0) == 11 && at(v, 11) == 0);
  pg_tensor *inner = view(v, 11, 1, 12, 0, 1, 0);
  CHECK(!inner, "offsets count from the view's first element");
  pg_tensor_free(v);
  v = view(t, 4, 1, 2, 0, 1, 0);
  pg_tensor *before = view(v, -4, 1, 12, 0, 1, 0);
  CHECK(before && at(before, 0) == 0, "a view may be widened within the storage");
  pg_tensor_free(before);
  pg_tensor_free(v);
  pg_tensor_free(t);
}

/* Read and write of many strided views against plain indexing; wide rows take the path of one
 * transfer per row, narrow ones the path through the whole extent. */
TEST(strided_reads_and_writes) {
  const int64_t sizes[] = {5, 200};
  for (int s = 0; s < 2; s++) {
    const int64_t rows = 7, columns = sizes[s], n = rows * columns;
    const struct {
      int64_t offset, shape[2], stride[2];
    } views[] = {
        {0, {columns, rows}, {1, columns}},                     /* transpose */
        {1, {rows, columns - 2}, {columns, 1}},                 /* columns 1 … n-2 */
        {0, {(rows + 1) / 2, columns}, {2 * columns, 1}},       /* every other row */
        {n - 1, {rows, columns}, {-columns, -1}},               /* reversed */
        {(rows - 1) * columns, {rows, columns}, {-columns, 1}}, /* rows reversed */
        {2, {rows, 1}, {columns, 1}},                           /* one column */
        {0, {1, (columns + 2) / 3}, {17, 3}},                   /* every third of a row */
    };
    for (size_t c = 0; c < sizeof views / sizeof views[0]; c++) {
      pg_tensor *t = counted(rows, columns), *v;
      CHECK(pg_tensor_view(t, views[c].offset, 2, views[c].shape, views[c].stride, &v) == 0);
      const int64_t m = pg_tensor_elements(v);
      float *got = malloc((size_t)m * sizeof *got), *all = malloc((size_t)n * sizeof *all);
      CHECK(pg_tensor_read(v, got) == 0);
      for (int64_t i = 0; i < m; i++) {
        const int64_t place = views[c].offset + i / views[c].shape[1] * views[c].stride[0] +
                              i % views[c].shape[1] * views[c].stride[1];
        CHECK(got[i] == (float)place, "view %zu element %lld: %g", c, (long long)i, got[i]);
        got[i] = -1000 - (float)place;
      }
      CHECK(pg_tensor_write(v, got) == 0);
      CHECK(pg_tensor_read(t, all) == 0);
      int64_t changed = 0;
      for (int64_t i = 0; i < n; i++) {
        CHECK(all[i] == (float)i || all[i] == -1000 - (float)i, "element %lld", (long long)i);
        changed += all[i] < 0;
      }
      CHECK(changed == m, "view %zu: %lld elements changed", c, (long long)changed);
      /* A clone is contiguous and equal; a copy into another strided view as well. */
      pg_tensor *clone, *other = counted(rows, columns), *target;
      CHECK(pg_tensor_clone(v, &clone) == 0 && pg_tensor_contiguous(clone));
      CHECK(pg_tensor_view(other, views[c].offset, 2, views[c].shape, views[c].stride, &target) ==
            0);
      CHECK(pg_tensor_copy(target, clone) == 0);
      float *back = malloc((size_t)m * sizeof *back);
      CHECK(pg_tensor_read(target, back) == 0);
      CHECK(memcmp(back, got, (size_t)m * sizeof *back) == 0, "view %zu", c);
      CHECK(pg_tensor_read(other, all) == 0);
      for (int64_t i = 0; i < n; i++)
        CHECK(all[i] == (float)i || all[i] == -1000 - (float)i, "view %zu element %lld", c,
              (long long)i);
      free(back);
      free(got);
      free(all);
      pg_tensor_free(clone);
      pg_tensor_free(target);
      pg_tensor_free(other);
      pg_tensor_free(v);
      pg_tensor_free(t);
    }
  }
}

TEST(copies) {
  pg_tensor *t = counted(3, 3), *flip = view(t, 0, 2, 3, 3, 1, 3), *other = counted(3, 4), *b;
  CHECK(pg_tensor_copy(t, other) == PG_EINVAL);
  CHECK(strstr(pg_context_message(ctx), "[3, 3]") && strstr(pg_context_message(ctx), "[3, 4]"),
        "%s", pg_context_message(ctx));
  CHECK(pg_tensor_new(ctx, PG_F64, 2, t->shape, &b) == 0);
  CHECK(pg_tensor_copy(t, b) == PG_EINVAL && strstr(pg_context_message(ctx), "F64"));
  /* Onto itself, transposed: the copy must not read what it has written. */
  CHECK(pg_tensor_copy(t, flip) == 0);
  const float want[9] = {0, 3, 6, 1, 4, 7, 2, 5, 8};
  float got[9];
  CHECK(pg_tensor_read(t, got) == 0 && memcmp(got, want, sizeof got) == 0);
  CHECK(pg_tensor_copy(t, t) == 0);
  /* A stretched view reads, and refuses to be written. */
  pg_tensor *stretched = view(t, 1, 2, 2, 2, 0, 1), *square = view(t, 0, 2, 2, 2, 3, 1);
  CHECK(at(stretched, 0) == 3 && at(stretched, 2) == 3 && at(stretched, 3) == 6);
  CHECK(pg_tensor_write(stretched, got) == PG_EINVAL);
  CHECK(pg_tensor_copy(stretched, square) == PG_EINVAL);
  /* Special values and denormals survive strided copies to the last bit. */
  const float special[9] = {1e-42f, -1e-45f, -0.0f, INFINITY, -INFINITY, NAN, 3e38f, -1e-38f, 1};
  pg_tensor *clone = NULL;
  CHECK(pg_tensor_write(flip, special) == 0 && pg_tensor_clone(flip, &clone) == 0);
  CHECK(pg_tensor_read(clone, got) == 0 && memcmp(got, special, sizeof got) == 0);
  pg_tensor_free(clone);
  pg_tensor_free(stretched);
  pg_tensor_free(square);
  pg_tensor_free(t);
  pg_tensor_free(flip);
  pg_tensor_free(other);
  pg_tensor_free(b);
}

TEST(other_types_and_more_dimensions) {
  const int64_t shape[3] = {2, 3, 4}, flipped[3] = {4, 3, 2}, stride[3] = {1, 4, 12};
  pg_tensor *t, *v, *clone;
  double values[24], got[24];
  for (int i = 0; i < 24; i++) values[i] = i + 0.125;
  CHECK(pg_tensor_new(ctx, PG_F64, 3, shape, &t) == 0 && pg_tensor_write(t, values) == 0);
  CHECK(pg_tensor_view(t, 0, 3, flipped, stride, &v) == 0 && pg_tensor_clone(v, &clone) == 0);
  CHECK(pg_tensor_read(clone, got) == 0);
  for (int i = 0; i < 24; i++)
    CHECK(got[i] == i / 6 + i / 2 % 3 * 4 + i % 2 * 12 + 0.125, "element %d: %g", i, got[i]);
  pg_tensor_free(t);
  pg_tensor_free(v);
  pg_tensor_free(clone);
}

TEST(empty_tensors) {
  const int64_t shapes[3][2] = {{0, 5}, {5, 0}, {0, 0}};
  for (int i = 0; i < 3; i++) {
    pg_tensor *t, *clone;
    float nothing = 7;
    CHECK(pg_tensor_new(ctx, PG_F32, 2, shapes[i], &t) == 0);
    CHECK(pg_tensor_elements(t) == 0 && pg_tensor_contiguous(t) && t->data);
    CHECK(pg_tensor_read(t, &nothing) == 0 && pg_tensor_write(t, &nothing) == 0 && nothing == 7);
    CHECK(pg_tensor_clone(t, &clone) == 0 && pg_tensor_copy(t, clone) == 0);
    CHECK(pg_context_live_tensors(ctx) == 2 && pg_context_bytes(ctx) == 0);
    pg_tensor_free(t);
    pg_tensor_free(clone);
  }
}

int main(void) {
  const pg_context_options options = {.device = unit_device(), .threads = 2};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(new_tensors_are_zero);
  RUN(refused_shapes);
  RUN(views_share_and_keep_their_storage);
  RUN(views_stay_inside);
  RUN(strided_reads_and_writes);
  RUN(copies);
  RUN(other_types_and_more_dimensions);
  RUN(empty_tensors);
  if (pg_context_live_tensors(ctx) != 0 || pg_context_bytes(ctx) != 0) {
    printf("not ok tensors are left: %lld\n", (long long)pg_context_live_tensors(ctx));
    unit_failed++;
  }
  pg_context_free(ctx);
  return unit_report();
}
