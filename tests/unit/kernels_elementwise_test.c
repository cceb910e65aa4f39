/* Element-wise operations, lerp, reductions and centring, over layouts: contiguous, strided,
 * transposed and broadcast. Results are compared to the bit. */
#include "kernels_unit.h"

#define VIEW(x, rs, cs) ((pg_view){(x), (rs), (cs)})

static float reference_binary(pg_binary_op op, float x, float y) {
  switch (op) {
  case PG_ADD: return x + y;
  case PG_SUB: return x - y;
  case PG_MUL: return x * y;
  case PG_DIV: return x / y;
  case PG_MIN: return isnan(x) || isnan(y) ? NAN : x < y ? x : y;
  case PG_MAX: return isnan(x) || isnan(y) ? NAN : x > y ? x : y;
  case PG_POW: return powf(x, y);
  case PG_LT: return x < y;
  case PG_LE: return x <= y;
  case PG_GT: return x > y;
  case PG_GE: return x >= y;
  case PG_EQ: return x == y;
  case PG_NE: return x != y;
  case PG_MASKED: return y != 0 ? x : -0.0f;
  }
  return NAN;
}
static int same(float a, float b) {
  return (isnan(a) && isnan(b)) || memcmp(&a, &b, 4) == 0;
}

TEST(binary) {
  unit_seed(51);
  int64_t shapes[][2] = {{1, 1}, {3, 5}, {37, 18}, {1, 40000}, {40000, 1}, {130, 257}};
  for (int c = 0; c < 6; c++) {
    int64_t rows = shapes[c][0], columns = shapes[c][1], n = rows * columns;
    float *a = unit_normals(n, 1), *b = unit_normals(n, 1), *out = unit_poisoned(n * 2);
    for (int64_t i = 0; i < n; i += 7) b[i] = a[i]; /* equal elements */
    if (n > 10) a[3] = NAN, b[4] = NAN, a[5] = INFINITY, b[6] = 0;
    struct {
      pg_view a, b, out;
    } layouts[] = {
        {VIEW(a, columns, 1), VIEW(b, columns, 1), VIEW(out, columns, 1)},
        {VIEW(a, columns, 1), VIEW(b, 0, 1), VIEW(out, columns, 1)},     /* row */
        {VIEW(a, columns, 1), VIEW(b, 1, 0), VIEW(out, columns, 1)},     /* column */
        {VIEW(a, 0, 0), VIEW(b, columns, 1), VIEW(out, 2 * columns, 2)}, /* scalar, gaps */
        {VIEW(a, 1, rows), VIEW(b, columns, 1), VIEW(out, columns, 1)},  /* transposed */
        {VIEW(a, columns, 1), VIEW(b, columns, 1), VIEW(out, 1, rows)},
    };
    for (int l = 0; l < 6; l++)
      for (int op = PG_ADD; op <= PG_MASKED; op++) {
        pg_view x = layouts[l].a, y = layouts[l].b, o = layouts[l].out;
        for (int64_t i = 0; i < n * 2; i++) out[i] = NAN;
        KERNEL(binary, (pg_binary_op)op, x, y, rows, columns, o);
        int wrong = 0;
        for (int64_t i = 0; i < rows; i++)
          for (int64_t j = 0; j < columns; j++)
            wrong += !same(o.data[i * o.row_stride + j * o.column_stride],
                           reference_binary((pg_binary_op)op,
                                            x.data[i * x.row_stride + j * x.column_stride],
                                            y.data[i * y.row_stride + j * y.column_stride]));
        CHECK(!wrong, "op %d, layout %d, [%lld,%lld]: %d wrong", op, l, (long long)rows,
              (long long)columns, wrong);
      }
    /* In place on either side. */
    float *left = unit_clone(a, n), *right = unit_clone(b, n);
    KERNEL(binary, PG_SUB, VIEW(a, columns, 1), VIEW(b, columns, 1), rows, columns,
           VIEW(out, columns, 1));
    KERNEL(binary, PG_SUB, VIEW(left, columns, 1), VIEW(b, columns, 1), rows, columns,
           VIEW(left, columns, 1));
    KERNEL(binary, PG_SUB, VIEW(a, columns, 1), VIEW(right, columns, 1), rows, columns,
           VIEW(right, columns, 1));
    int wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += !same(left[i], out[i]) || !same(right[i], out[i]);
    CHECK(!wrong, "in place: %d wrong", wrong);
    free(a), free(b), free(out), free(left), free(right);
  }
}

TEST(scalar) {
  unit_seed(52);
  int64_t rows = 41, columns = 67, n = rows * columns;
  float *a = unit_normals(n, 1), *out = unit_poisoned(n);
  for (int op = PG_ADD; op <= PG_MASKED; op++)
    for (int reversed = 0; reversed < 2; reversed++) {
      double s = 0.1; /* rounds to fp32 first */
      KERNEL(scalar, (pg_binary_op)op, VIEW(a, columns, 1), s, reversed, rows, columns,
             VIEW(out, columns, 1));
      int wrong = 0;
      for (int64_t i = 0; i < n; i++)
        wrong += !same(out[i], reversed ? reference_binary((pg_binary_op)op, 0.1f, a[i])
                                        : reference_binary((pg_binary_op)op, a[i], 0.1f));
      CHECK(!wrong, "op %d reversed %d: %d wrong", op, reversed, wrong);
    }
  free(a), free(out);
}

TEST(unary) {
  float x[] = {-2.5f, -1, -0.0f, 0, 0.25f, 1, 4, 100, INFINITY, -INFINITY, NAN};
  int n = (int)(sizeof x / sizeof *x);
  for (int op = PG_NEG; op <= PG_ROUND; op++)
    for (int gaps = 1; gaps <= 2; gaps++) {
      float in[22], out[22];
      for (int i = 0; i < n; i++) in[i * gaps] = x[i];
      for (int i = 0; i < 22; i++) out[i] = NAN;
      KERNEL(unary, (pg_unary_op)op, VIEW(in, 0, gaps), 1, n, VIEW(out, 0, gaps));
      for (int i = 0; i < n; i++) {
        float v = x[i], want = NAN;
        switch (op) {
        case PG_NEG: want = -v; break;
        case PG_ABS: want = fabsf(v); break;
        case PG_SQRT: want = sqrtf(v); break;
        case PG_SQUARE: want = v * v; break;
        case PG_EXP: want = expf(v); break;
        case PG_LOG: want = logf(v); break;
        case PG_SIGN: want = isnan(v) ? NAN : v > 0 ? 1 : v < 0 ? -1 : v; break;
        case PG_RECIPROCAL: want = 1 / v; break;
        case PG_TANH: want = tanhf(v); break;
        case PG_ISFINITE: want = isfinite(v) ? 1 : 0; break;
        case PG_FLOOR: want = floorf(v); break;
        case PG_CEIL: want = ceilf(v); break;
        case PG_ROUND:
          want = v == 0.25f ? 0 : v == -2.5f ? -2 : v;
          break; /* the others are whole */
        }
        CHECK(same(out[i * gaps], want), "op %d of %g: %g, want %g", op, v, out[i * gaps], want);
      }
    }
}

TEST(lerp) {
  unit_seed(53);
  int64_t rows = 130, columns = 253, n = rows * columns;
  double weights[] = {0, 1, 0.05, 1 - 0.95, 1.0 / 3};
  for (int c = 0; c < 5; c++)
    for (int layout = 0; layout < 3; layout++) {
      float *x = unit_normals(n, 1), *y = unit_normals(n, 1), *before = unit_clone(x, n);
      float keep = (float)(1 - weights[c]), take = (float)weights[c];
      pg_view v = layout == 0   ? VIEW(y, columns, 1)
                  : layout == 1 ? VIEW(y, 0, 1)
                                : VIEW(y, 1, rows);
      KERNEL(lerp, VIEW(x, columns, 1), v, weights[c], rows, columns);
      int wrong = 0;
      for (int64_t i = 0; i < n; i++) {
        float from = y[i / columns * v.row_stride + i % columns * v.column_stride];
        volatile float kept = keep * before[i], taken = take * from; /* never contracted */
        wrong += !same(x[i], kept + taken);
      }
      CHECK(!wrong, "w=%g layout %d: %d wrong", weights[c], layout, wrong);
      free(x), free(y), free(before);
    }
}

/* The documented order: lanes of 16, added in halves. */
static double lanes16(const float *x, int64_t stride, int64_t n, bool square) {
  double lane[16] = {0};
  for (int64_t i = 0; i < n; i++) {
    double v = x[i * stride];
    lane[i % 16] += square ? v * v : v;
  }
  for (int w = 8; w; w /= 2)
    for (int l = 0; l < w; l++) lane[l] += lane[l + w];
  return lane[0];
}

TEST(reduce_rows) {
  unit_seed(54);
  int64_t shapes[][2] = {{1, 1}, {3, 5}, {40, 16}, {37, 513}, {2000, 33}};
  for (int c = 0; c < 5; c++)
    for (int transposed = 0; transposed < 2; transposed++) {
      int64_t rows = shapes[c][0], columns = shapes[c][1], n = rows * columns;
      float *a = unit_normals(n, 1), *out = unit_poisoned(rows);
      int64_t rs = transposed ? 1 : columns, cs = transposed ? rows : 1;
      for (int op = PG_SUM; op <= PG_ARGMIN; op++) {
        KERNEL(reduce, (pg_reduce_op)op, VIEW(a, rs, cs), rows, columns, 1, out);
        for (int64_t i = 0; i < rows; i++) {
          const float *x = a + i * rs;
          int64_t max = 0, min = 0;
          for (int64_t j = 0; j < columns; j++) {
            if (x[j * cs] > x[max * cs]) max = j;
            if (x[j * cs] < x[min * cs]) min = j;
          }
          float want[] = {(float)lanes16(x, cs, columns, false),
                          (float)(lanes16(x, cs, columns, false) / (double)columns),
                          x[max * cs],
                          x[min * cs],
                          (float)sqrt(lanes16(x, cs, columns, true)),
                          (float)max,
                          (float)min};
          CHECK(out[i] == want[op], "op %d row %lld: %.9g, want %.9g", op, (long long)i,
                (double)out[i], (double)want[op]);
        }
      }
      free(a), free(out);
    }
}

TEST(reduce_columns_and_all) {
  unit_seed(55);
  int64_t shapes[][2] = {{1, 1}, {5, 3}, {63, 40}, {1000, 700}, {70000, 1}, {1, 9000}};
  for (int c = 0; c < 6; c++)
    for (int transposed = 0; transposed < 2; transposed++) {
      int64_t rows = shapes[c][0], columns = shapes[c][1], n = rows * columns;
      float *a = unit_normals(n, 1), *out = unit_poisoned(columns), all[1];
      int64_t rs = transposed ? 1 : columns, cs = transposed ? rows : 1;
      for (int op = PG_SUM; op <= PG_ARGMIN; op++) {
        double sum = 0, squares = 0, magnitude = 0, most = -INFINITY, least = INFINITY;
        int64_t top = 0, bottom = 0;
        KERNEL(reduce, (pg_reduce_op)op, VIEW(a, rs, cs), rows, columns, 0, out);
        KERNEL(reduce, (pg_reduce_op)op, VIEW(a, rs, cs), rows, columns, -1, all);
        int wrong = 0;
        for (int64_t j = 0; j <= columns; j++) {
          double s = 0, q2 = 0, mag = 0, max = -INFINITY, min = INFINITY;
          int64_t amax = 0, amin = 0, count = j < columns ? rows : n;
          for (int64_t i = 0; i < rows && j < columns; i++) {
            double v = a[i * rs + j * cs];
            s += v, q2 += v * v, mag += fabs(v);
            if (v > max) max = v, amax = i;
            if (v < min) min = v, amin = i;
            if (v > most || (v == most && i * columns + j < top)) most = v, top = i * columns + j;
            if (v < least || (v == least && i * columns + j < bottom))
              least = v, bottom = i * columns + j;
          }
          sum += s, squares += q2, magnitude += mag;
          double got = j < columns ? out[j] : all[0];
          if (j == columns)
            s = sum, q2 = squares, mag = magnitude, max = most, min = least, amax = top,
            amin = bottom;
          /* fp64 sums rounded once to fp32: u of the result, and 2^-52 n of the magnitudes. */
          double want[] = {s, s / (double)count, max, min, sqrt(q2), (double)amax, (double)amin};
          double slack = UNIT_ULP * fabs(want[op]) + 0x1p-52 * (double)count * mag;
          if (op >= PG_ARGMAX) slack = UNIT_ULP * want[op];
          if (op == PG_RMAX || op == PG_RMIN) slack = 0;
          wrong += !(fabs(got - want[op]) <= slack);
        }
        CHECK(!wrong, "op %d [%lld,%lld] transposed %d: %d wrong", op, (long long)rows,
              (long long)columns, transposed, wrong);
      }
      free(a), free(out);
    }
}

TEST(reduce_special) {
  float x[] = {3, NAN, 7, NAN, 2, -1}, out[3];
  KERNEL(reduce, PG_RMAX, VIEW(x, 3, 1), 2, 3, 1, out);
  CHECK(isnan(out[0]) && isnan(out[1]), "%g %g", out[0], out[1]);
  KERNEL(reduce, PG_ARGMIN, VIEW(x, 3, 1), 2, 3, 1, out);
  CHECK(out[0] == 1 && out[1] == 0, "the first NaN: %g %g", out[0], out[1]);
  KERNEL(reduce, PG_RMIN, VIEW(x, 3, 1), 2, 3, 0, out);
  CHECK(isnan(out[0]) && isnan(out[1]) && out[2] == -1, "%g %g %g", out[0], out[1], out[2]);
  KERNEL(reduce, PG_ARGMAX, VIEW(x, 3, 1), 2, 3, -1, out);
  CHECK(out[0] == 1, "%g", out[0]);
  KERNEL(reduce, PG_SUM, VIEW(x, 3, 1), 2, 3, -1, out);
  CHECK(isnan(out[0]), "%g", out[0]);
  float ties[] = {5, 1, 5, 1, 5};
  KERNEL(reduce, PG_ARGMAX, VIEW(ties, 5, 1), 1, 5, 1, out);
  CHECK(out[0] == 0, "the first of equals: %g", out[0]);
  KERNEL(reduce, PG_ARGMIN, VIEW(ties, 1, 1), 5, 1, 0, out);
  CHECK(out[0] == 1, "the first of equals: %g", out[0]);
  /* Squares that fp32 could not hold. */
  float tiny[] = {3e-30f, 4e-30f}, huge[] = {3e30f, 4e30f};
  KERNEL(reduce, PG_NORM, VIEW(tiny, 2, 1), 1, 2, 1, out);
  CHECK_CLOSE(out[0], 5e-30, 2 * UNIT_ULP);
  KERNEL(reduce, PG_NORM, VIEW(huge, 2, 1), 1, 2, -1, out);
  CHECK_CLOSE(out[0], 5e30, 2 * UNIT_ULP);
}

TEST(center_rows) {
  unit_seed(56);
  int64_t shapes[][2] = {{1, 3}, {2, 1}, {65, 33}, {3000, 64}};
  for (int c = 0; c < 4; c++) {
    int64_t rows = shapes[c][0], columns = shapes[c][1], n = rows * columns;
    float *x = unit_normals(n, 1), *y = unit_poisoned(n);
    for (int64_t i = 0; i < n; i++) x[i] += 100;
    KERNEL(center_rows, x, rows, columns, y);
    for (int64_t j = 0; j < columns; j++) {
      double mean = 0;
      for (int64_t i = 0; i < rows; i++) mean += x[i * columns + j];
      mean /= (double)rows;
      for (int64_t i = 0; i < rows; i++) {
        double want = (double)x[i * columns + j] - mean;
        /* One rounding; the mean of numbers near 100 is good to 100 * 2^-53 * rows. */
        double slack = UNIT_ULP * fabs(want) + 1e-14 * (double)rows;
        CHECK(fabs(y[i * columns + j] - want) <= slack, "%.9g, want %.9g",
              (double)y[i * columns + j], want);
      }
    }
    KERNEL(center_rows, x, rows, columns, x);
    CHECK(unit_same_bits(x, y, n), "in place");
    free(x), free(y);
  }
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(binary);
    RUN(scalar);
    RUN(unary);
    RUN(lerp);
    RUN(reduce_rows);
    RUN(reduce_columns_and_all);
    RUN(reduce_special);
    RUN(center_rows);
  }
  return unit_kernels_report();
}
