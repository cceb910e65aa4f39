/* Tensor arithmetic against plain loops: broadcasting, aliasing, reductions, products, refusals. */
#include "core/tensor_ops.h"
#include "unit.h"

static pg_context *ctx;
#define MESSAGE_HAS(text)                                                                          \
  CHECK(strstr(pg_context_message(ctx), text), "message: %s", pg_context_message(ctx))

/* A tensor with these elements; ndim 0, 1 ([columns]) or 2. */
static pg_tensor *tensor(int ndim, int64_t rows, int64_t columns, const float *values) {
  const int64_t shape[2] = {ndim == 2 ? rows : columns, columns};
  pg_tensor *t;
  if (pg_tensor_new(ctx, PG_F32, ndim, shape, &t) < 0 || pg_tensor_write(t, values) < 0) abort();
  return t;
}

/* Elements 0.5, 1.0, 1.5, … with changing sign, none zero. */
static pg_tensor *filled(int ndim, int64_t rows, int64_t columns) {
  float *values = malloc((size_t)(rows * columns + 1) * sizeof *values);
  for (int64_t i = 0; i < rows * columns + 1; i++)
    values[i] = (float)(i % 7 + 1) * (i % 3 ? 0.5f : -0.25f);
  pg_tensor *t = tensor(ndim, rows, columns, values);
  free(values);
  return t;
}

static pg_tensor *transposed(const pg_tensor *t) {
  const int64_t shape[2] = {t->shape[1], t->shape[0]}, stride[2] = {t->stride[1], t->stride[0]};
  pg_tensor *v;
  if (pg_tensor_view(t, 0, 2, shape, stride, &v) < 0) abort();
  return v;
}

static float *values_of(const pg_tensor *t) {
  float *values = malloc((size_t)(pg_tensor_elements(t) + 1) * sizeof *values);
  if (pg_tensor_read(t, values) < 0) abort();
  return values;
}

static float at(const pg_tensor *t, int64_t i) {
  float *values = values_of(t);
  const float x = values[i];
  free(values);
  return x;
}

static int64_t rows_of(const pg_tensor *t) {
  return t->ndim == 2 ? t->shape[0] : 1;
}
static int64_t columns_of(const pg_tensor *t) {
  return t->ndim ? t->shape[t->ndim - 1] : 1;
}

static double reference(const char *op, double x, double y) {
  if (strcmp(op, "add") == 0) return x + y;
  if (strcmp(op, "sub") == 0) return x - y;
  if (strcmp(op, "mul") == 0) return x * y;
  if (strcmp(op, "div") == 0) return x / y;
  if (strcmp(op, "minimum") == 0) return x < y ? x : y;
  if (strcmp(op, "maximum") == 0) return x > y ? x : y;
  if (strcmp(op, "pow") == 0) return pow(x, y);
  if (strcmp(op, "lt") == 0) return x < y;
  if (strcmp(op, "le") == 0) return x <= y;
  if (strcmp(op, "gt") == 0) return x > y;
  if (strcmp(op, "ge") == 0) return x >= y;
  if (strcmp(op, "eq") == 0) return x == y;
  return x != y;
}
static const char *const binary_ops[] = {"add", "sub", "mul", "div", "minimum", "maximum", "pow",
                                         "lt",  "le",  "gt",  "ge",  "eq",      "ne"};

/* One fp32 rounding (2^-24) of an exact result; powf is good to a few units, so 1e-6 for it. */
static int close_to(const char *op, double got, double want) {
  if (isnan(want)) return isnan(got);
  return fabs(got - want) <= (strcmp(op, "pow") == 0 ? 1e-6 : 6e-8) * fabs(want);
}

TEST(broadcasting) {
  static const struct {
    int ndim_a;
    int64_t a[2];
    int ndim_b;
    int64_t b[2];
    int ndim;
    int64_t shape[2];
  } cases[] = {
      {2, {3, 4}, 2, {3, 4}, 2, {3, 4}},         {2, {3, 4}, 2, {1, 4}, 2, {3, 4}},
      {2, {3, 4}, 2, {3, 1}, 2, {3, 4}},         {2, {3, 1}, 2, {1, 4}, 2, {3, 4}},
      {2, {3, 4}, 1, {1, 4}, 2, {3, 4}},         {1, {1, 4}, 2, {3, 1}, 2, {3, 4}},
      {2, {3, 4}, 0, {1, 1}, 2, {3, 4}},         {0, {1, 1}, 1, {1, 5}, 1, {5, 0}},
      {0, {1, 1}, 0, {1, 1}, 0, {0, 0}},         {1, {1, 5}, 1, {1, 1}, 1, {5, 0}},
      {2, {0, 4}, 2, {1, 4}, 2, {0, 4}},         {2, {3, 0}, 2, {3, 1}, 2, {3, 0}},
      {2, {70, 300}, 1, {1, 300}, 2, {70, 300}},
  };
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    pg_tensor *a = filled(cases[c].ndim_a, cases[c].a[0], cases[c].a[1]);
    pg_tensor *b = filled(cases[c].ndim_b, cases[c].b[0], cases[c].b[1]);
    float *x = values_of(a), *y = values_of(b);
    for (size_t o = 0; o < sizeof binary_ops / sizeof binary_ops[0]; o++) {
      pg_tensor *r;
      CHECK(pg_tensor_binary(binary_ops[o], a, b, NULL, &r) == 0, "%s", pg_context_message(ctx));
      CHECK(r->ndim == cases[c].ndim, "case %zu", c);
      for (int i = 0; i < r->ndim; i++) CHECK(r->shape[i] == cases[c].shape[i], "case %zu", c);
      float *z = values_of(r);
      const int64_t columns = columns_of(r);
      for (int64_t i = 0; i < pg_tensor_elements(r); i++) {
        const int64_t row = i / columns, column = i % columns;
        const float p =
            x[(rows_of(a) == 1 ? 0 : row) * columns_of(a) + (columns_of(a) == 1 ? 0 : column)];
        const float q =
            y[(rows_of(b) == 1 ? 0 : row) * columns_of(b) + (columns_of(b) == 1 ? 0 : column)];
        const double want = reference(binary_ops[o], p, q);
        CHECK(close_to(binary_ops[o], z[i], want), "case %zu, %s(%g, %g) = %g", c, binary_ops[o], p,
              q, z[i]);
      }
      free(z);
      pg_tensor_free(r);
    }
    free(x);
    free(y);
    pg_tensor_free(a);
    pg_tensor_free(b);
  }
}

TEST(shape_errors_name_both_shapes) {
  pg_tensor *a = filled(2, 3, 4), *b = filled(2, 4, 3), *v = filled(1, 1, 3), *r, *wide, *deep;
  const int64_t shape[3] = {2, 2, 2};
  CHECK(pg_tensor_new(ctx, PG_F64, 2, a->shape, &wide) == 0);
  CHECK(pg_tensor_new(ctx, PG_F32, 3, shape, &deep) == 0);
  CHECK(pg_tensor_binary("add", a, b, NULL, &r) == PG_EINVAL && !r);
  MESSAGE_HAS("[3, 4] and [4, 3]");
  CHECK(pg_tensor_binary("add", a, v, NULL, &r) == PG_EINVAL, "a vector is a row");
  MESSAGE_HAS("[3, 4] and [3]");
  CHECK(pg_tensor_binary("add", v, a, v, NULL) == PG_EINVAL);
  CHECK(pg_tensor_binary("add", a, a, b, NULL) == PG_EINVAL);
  MESSAGE_HAS("[3, 4] does not fit in place into shape [4, 3]");
  CHECK(pg_tensor_binary("add", a, wide, NULL, &r) == PG_EINVAL);
  MESSAGE_HAS("F64");
  CHECK(pg_tensor_unary("neg", deep, NULL, &r) == PG_EINVAL);
  MESSAGE_HAS("[2, 2, 2]");
  CHECK(pg_tensor_binary("plus", a, a, NULL, &r) == PG_EINVAL);
  MESSAGE_HAS("\"plus\"");
  CHECK(pg_tensor_unary("add", a, NULL, &r) == PG_EINVAL && !r);
  CHECK(pg_tensor_lerp(v, a, .5) == PG_EINVAL, "the first does not stretch");
  MESSAGE_HAS("[3] and [3, 4]");
  CHECK(pg_tensor_matmul(a, a, &r) == PG_EINVAL && !r);
  MESSAGE_HAS("matmul: [3, 4] x [3, 4]: the inner sizes 4 and 3 differ");
  CHECK(pg_tensor_rows_op("mul", a, b, NULL, &r) == PG_EINVAL);
  MESSAGE_HAS("[3, 4] and [4, 3]");
  CHECK(pg_tensor_reduce("sum", a, 2, &r) == PG_EINVAL && !r);
  CHECK(pg_tensor_reduce("sum", v, 1, &r) == PG_EINVAL && !r);
  /* A stretched view cannot be a result. */
  const int64_t square[2] = {4, 4}, stride[2] = {0, 1};
  pg_tensor *stretched;
  CHECK(pg_tensor_view(a, 0, 2, square, stride, &stretched) == 0);
  CHECK(pg_tensor_scalar("add", stretched, 1, false, stretched, NULL) == PG_EINVAL);
  CHECK(pg_tensor_fill(stretched, 1) == PG_EINVAL);
  pg_context *other;
  CHECK(pg_context_new(NULL, &other, NULL, 0) == 0);
  pg_tensor *foreign;
  CHECK(pg_tensor_new(other, PG_F32, 2, a->shape, &foreign) == 0);
  CHECK(pg_tensor_binary("add", a, foreign, NULL, &r) == PG_EINVAL);
  MESSAGE_HAS("different contexts");
  CHECK(pg_tensor_matmul(a, foreign, &r) == PG_EINVAL);
  pg_tensor_free(foreign);
  pg_context_free(other);
  pg_tensor *const all[] = {a, b, v, wide, deep, stretched};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) pg_tensor_free(all[i]);
}

TEST(scalars_and_unary) {
  pg_tensor *a = filled(2, 5, 6), *flip = transposed(a), *r;
  float *x = values_of(flip);
  for (size_t o = 0; o < sizeof binary_ops / sizeof binary_ops[0]; o++)
    for (int reversed = 0; reversed < 2; reversed++) {
      CHECK(pg_tensor_scalar(binary_ops[o], flip, 1.5, reversed, NULL, &r) == 0);
      for (int i = 0; i < 30; i++) {
        const double want =
            reversed ? reference(binary_ops[o], 1.5, x[i]) : reference(binary_ops[o], x[i], 1.5);
        CHECK(close_to(binary_ops[o], at(r, i), want), "%s %g: %g, want %g", binary_ops[o], x[i],
              at(r, i), want);
      }
      pg_tensor_free(r);
    }
  static const struct {
    const char *name;
    double (*function)(double);
  } unary[] = {{"abs", fabs}, {"sqrt", sqrt}, {"exp", exp}, {"log", log}, {"tanh", tanh}};
  for (size_t o = 0; o < sizeof unary / sizeof unary[0]; o++) {
    CHECK(pg_tensor_unary(unary[o].name, flip, NULL, &r) == 0);
    for (int i = 0; i < 30; i++)
      CHECK(close_to("pow", at(r, i), unary[o].function(x[i])), "%s %g", unary[o].name, x[i]);
    pg_tensor_free(r);
  }
  const float special[6] = {NAN, INFINITY, -INFINITY, -2, 0, 4};
  const struct {
    const char *name;
    float want[6];
  } exact[] = {{"isfinite", {0, 0, 0, 1, 1, 1}},
               {"sign", {NAN, 1, -1, -1, 0, 1}},
               {"square", {NAN, INFINITY, INFINITY, 4, 0, 16}},
               {"neg", {NAN, -INFINITY, INFINITY, 2, 0, -4}},
               {"reciprocal", {NAN, 0, 0, -.5f, INFINITY, .25f}}};
  pg_tensor *s = tensor(1, 1, 6, special);
  for (size_t o = 0; o < sizeof exact / sizeof exact[0]; o++) {
    CHECK(pg_tensor_unary(exact[o].name, s, NULL, &r) == 0);
    for (int i = 0; i < 6; i++) {
      const float got = at(r, i), want = exact[o].want[i];
      CHECK(isnan(want) ? isnan(got) : got == want, "%s of %g is %g", exact[o].name, special[i],
            got);
    }
    pg_tensor_free(r);
  }
  free(x);
  pg_tensor_free(a);
  pg_tensor_free(flip);
  pg_tensor_free(s);
}

TEST(in_place_and_overlapping) {
  const float values[4] = {1, 2, 3, 4};
  pg_tensor *a = tensor(2, 2, 2, values), *flip = transposed(a), *row;
  const int64_t shape[1] = {2}, stride[1] = {1};
  CHECK(pg_tensor_view(a, 0, 1, shape, stride, &row) == 0);
  CHECK(pg_tensor_binary("add", a, flip, a, NULL) == 0); /* 2 5 5 8, not read after writing */
  CHECK(at(a, 0) == 2 && at(a, 1) == 5 && at(a, 2) == 5 && at(a, 3) == 8, "%g %g %g %g", at(a, 0),
        at(a, 1), at(a, 2), at(a, 3));
  CHECK(pg_tensor_binary("sub", a, row, a, NULL) == 0); /* its own first row is subtracted */
  CHECK(at(a, 0) == 0 && at(a, 1) == 0 && at(a, 2) == 3 && at(a, 3) == 3, "%g %g %g %g", at(a, 0),
        at(a, 1), at(a, 2), at(a, 3));
  CHECK(pg_tensor_binary("mul", a, a, a, NULL) == 0 && at(a, 3) == 9);
  CHECK(pg_tensor_scalar("add", a, 1, false, flip, NULL) == 0); /* through another view */
  CHECK(at(a, 0) == 1 && at(a, 1) == 10 && at(a, 2) == 1 && at(a, 3) == 10, "%g %g %g %g", at(a, 0),
        at(a, 1), at(a, 2), at(a, 3));
  CHECK(pg_tensor_unary("neg", a, flip, NULL) == 0);
  CHECK(at(a, 0) == -1 && at(a, 1) == -1 && at(a, 2) == -10 && at(a, 3) == -10);
  CHECK(pg_tensor_lerp(a, row, 0.25) == 0);
  CHECK(at(a, 0) == -1 && at(a, 2) == -10 * .75f - .25f, "%g", at(a, 2));
  CHECK(pg_context_live_tensors(ctx) == 1, "temporary copies are gone");
  pg_tensor_free(a);
  pg_tensor_free(flip);
  pg_tensor_free(row);
}

TEST(lerp_is_two_products_and_a_sum) {
  const float xs[3] = {1, -3, 0.1f}, ys[3] = {2, 5, 0.7f};
  pg_tensor *x = tensor(1, 1, 3, xs), *y = tensor(1, 1, 3, ys);
  const float keep = (float)(1 - 0.1), w = 0.1f;
  CHECK(pg_tensor_lerp(x, y, 0.1) == 0);
  for (int i = 0; i < 3; i++) {
    volatile float p = keep * xs[i], q = w * ys[i];
    CHECK(at(x, i) == p + q, "element %d: %.9g", i, at(x, i));
  }
  pg_tensor_free(x);
  pg_tensor_free(y);
}

TEST(reductions) {
  pg_tensor *m = filled(2, 40, 33), *flip = transposed(m), *r;
  for (int f = 0; f < 2; f++) {
    const pg_tensor *a = f ? flip : m;
    const int64_t rows = a->shape[0], columns = a->shape[1];
    float *x = values_of(a);
    for (int axis = -1; axis <= 1; axis++) {
      const int64_t results = axis < 0 ? 1 : axis == 0 ? columns : rows;
      const char *const names[] = {"sum", "mean", "max", "min", "norm", "argmax", "argmin"};
      for (int o = 0; o < 7; o++) {
        CHECK(pg_tensor_reduce(names[o], a, axis, &r) == 0, "%s", pg_context_message(ctx));
        CHECK(r->ndim == (axis < 0 ? 0 : 1) && pg_tensor_elements(r) == results);
        for (int64_t k = 0; k < results; k++) {
          double sum = 0, square = 0, high = -INFINITY, low = INFINITY, n = 0, first = -1,
                 last = -1;
          for (int64_t i = 0; i < rows * columns; i++) {
            if (axis == 0 && i % columns != k) continue;
            if (axis == 1 && i / columns != k) continue;
            sum += x[i], square += (double)x[i] * x[i];
            if (x[i] > high) high = x[i], first = n;
            if (x[i] < low) low = x[i], last = n;
            n++;
          }
          const double want[7] = {sum, sum / n, high, low, sqrt(square), first, last};
          CHECK(fabs(at(r, k) - want[o]) <= 6e-8 * fabs(want[o]), "%s axis %d: %g, want %g",
                names[o], axis, at(r, k), want[o]);
        }
        pg_tensor_free(r);
      }
    }
    free(x);
  }
  pg_tensor_free(m);
  pg_tensor_free(flip);
}

TEST(reductions_of_nothing) {
  pg_tensor *none = filled(2, 0, 4), *r;
  CHECK(pg_tensor_reduce("sum", none, 0, &r) == 0 && pg_tensor_elements(r) == 4 && at(r, 3) == 0);
  pg_tensor_free(r);
  CHECK(pg_tensor_reduce("norm", none, -1, &r) == 0 && at(r, 0) == 0);
  pg_tensor_free(r);
  CHECK(pg_tensor_reduce("max", none, 1, &r) == 0 && pg_tensor_elements(r) == 0);
  pg_tensor_free(r);
  CHECK(pg_tensor_reduce("max", none, 0, &r) == PG_EINVAL && !r);
  MESSAGE_HAS("[0, 4]");
  CHECK(pg_tensor_reduce("mean", none, -1, &r) == PG_EINVAL);
  CHECK(pg_tensor_reduce("argmin", none, 0, &r) == PG_EINVAL);
  pg_tensor_free(none);
}

/* Product of plain matrices in fp64; inner sizes up to 24 and values up to 3.5 that are multiples
 * of 1/4 make every fp32 sum exact, so equality is exact. */
static void check_product(const pg_tensor *a, const pg_tensor *b) {
  pg_tensor *r;
  CHECK(pg_tensor_matmul(a, b, &r) == 0, "%s", pg_context_message(ctx));
  const int64_t m = rows_of(a), k = columns_of(a), n = b->ndim == 2 ? b->shape[1] : 1;
  float *x = values_of(a), *y = values_of(b), *z = values_of(r);
  CHECK(pg_tensor_elements(r) == m * n && r->ndim == a->ndim + b->ndim - 2);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = 0;
      for (int64_t l = 0; l < k; l++) sum += (double)x[i * k + l] * y[l * n + j];
      CHECK(z[i * n + j] == (float)sum, "(%lld,%lld): %g, want %g", (long long)i, (long long)j,
            z[i * n + j], sum);
    }
  free(x);
  free(y);
  free(z);
  pg_tensor_free(r);
}

TEST(products) {
  static const int64_t sizes[][3] = {{1, 1, 1},  {3, 4, 5}, {1, 24, 7}, {7, 1, 3},
                                     {5, 24, 1}, {2, 0, 3}, {0, 3, 2},  {17, 24, 33}};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
    const int64_t m = sizes[s][0], k = sizes[s][1], n = sizes[s][2];
    pg_tensor *a = filled(2, m, k), *b = filled(2, k, n), *c = filled(2, k, m);
    pg_tensor *d = filled(2, n, k), *at_ = transposed(c), *bt = transposed(d);
    check_product(a, b);
    check_product(at_, b);
    check_product(a, bt);
    check_product(at_, bt);
    /* Every second column of wider matrices: neither row-major nor transposed. */
    pg_tensor *wide = filled(2, m, 2 * k + 1), *tall = filled(2, k, 2 * n + 1), *a2, *b2;
    const int64_t shape_a[2] = {m, k}, stride_a[2] = {2 * k + 1, 2};
    const int64_t shape_b[2] = {k, n}, stride_b[2] = {2 * n + 1, 2}, row[2] = {0, 1};
    CHECK(pg_tensor_view(wide, 0, 2, shape_a, stride_a, &a2) == 0);
    CHECK(pg_tensor_view(tall, 0, 2, shape_b, stride_b, &b2) == 0);
    check_product(a2, b2);
    check_product(a2, bt);
    pg_tensor *stretched; /* one row, repeated */
    if (k > 0) {
      CHECK(pg_tensor_view(wide, 0, 2, shape_a, row, &stretched) == 0 || m == 0);
      if (stretched) check_product(stretched, b);
      pg_tensor_free(stretched);
    }
    pg_tensor *left = filled(1, 1, m), *right = filled(1, 1, k);
    check_product(a, right);
    check_product(at_, right);
    check_product(left, a);
    check_product(right, right);
    pg_tensor *column; /* a strided vector */
    const int64_t shape_c[1] = {k}, stride_c[1] = {2 * n + 1};
    CHECK(pg_tensor_view(tall, 0, 1, shape_c, stride_c, &column) == 0);
    check_product(a, column);
    check_product(column, b);
    pg_tensor *const all[] = {a, b, c, d, at_, bt, wide, tall, a2, b2, left, right, column};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) pg_tensor_free(all[i]);
  }
}

TEST(fill) {
  const double values[] = {0, -0.0, 1.5, NAN, -INFINITY, 1e300, 0.1};
  pg_tensor *a = filled(2, 3, 4), *flip = transposed(a), *column;
  const int64_t shape[2] = {3, 1}, stride[2] = {4, 1};
  CHECK(pg_tensor_view(a, 2, 2, shape, stride, &column) == 0);
  for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
    const float want = (float)values[i];
    CHECK(pg_tensor_fill(i % 2 ? flip : a, values[i]) == 0);
    for (int k = 0; k < 12; k++) {
      const float got = at(a, k);
      CHECK(isnan(want) ? isnan(got) : got == want && !signbit(got) == !signbit(want), "%g", got);
    }
  }
  CHECK(pg_tensor_fill(a, 7) == 0 && pg_tensor_fill(column, 0) == 0);
  for (int k = 0; k < 12; k++) CHECK(at(a, k) == (k % 4 == 2 ? 0 : 7), "element %d", k);
  pg_tensor_free(a);
  pg_tensor_free(flip);
  pg_tensor_free(column);
}

TEST(rows_operations) {
  const float numbers[3] = {2, -4, 0.5f};
  pg_tensor *a = filled(2, 3, 5), *v = tensor(1, 1, 3, numbers), *column = tensor(2, 3, 1, numbers);
  float *x = values_of(a);
  pg_tensor *r;
  for (int c = 0; c < 2; c++) {
    CHECK(pg_tensor_rows_op("div", a, c ? column : v, NULL, &r) == 0, "%s",
          pg_context_message(ctx));
    for (int i = 0; i < 15; i++) CHECK(at(r, i) == x[i] / numbers[i / 5], "element %d", i);
    pg_tensor_free(r);
  }
  CHECK(pg_tensor_rows_op("mul", a, v, a, NULL) == 0);
  for (int i = 0; i < 15; i++) CHECK(at(a, i) == x[i] * numbers[i / 5], "element %d", i);
  free(x);
  pg_tensor_free(a);
  pg_tensor_free(v);
  pg_tensor_free(column);
}

int main(void) {
  const pg_context_options options = {.device = unit_device(), .threads = 2};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(broadcasting);
  RUN(shape_errors_name_both_shapes);
  RUN(scalars_and_unary);
  RUN(in_place_and_overlapping);
  RUN(lerp_is_two_products_and_a_sum);
  RUN(reductions);
  RUN(reductions_of_nothing);
  RUN(products);
  RUN(fill);
  RUN(rows_operations);
  if (pg_context_live_tensors(ctx) != 0 || pg_context_bytes(ctx) != 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
