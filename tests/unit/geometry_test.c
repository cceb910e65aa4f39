/* The row diameter against published values and fp64 brute force, and the head's geometry as
 * properties that must hold with the library's own D (SPEC section 5). Everything but D is computed
 * here in double precision. */
#include "core/geometry.h"
#include "core/internal.h"
#include "core/random.h"
#include "unit.h"

static pg_context *ctx;

static pg_tensor *upload(const float *x, int64_t rows, int64_t columns) {
  pg_tensor *t = NULL;
  CHECK(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &t) == 0, "%s",
        pg_context_message(ctx));
  CHECK(pg_tensor_write(t, x) == 0, "write");
  return t;
}

static pg_diameter diameter(const float *x, int64_t rows, int64_t columns) {
  pg_tensor *t = upload(x, rows, columns);
  pg_diameter d = {.value = NAN};
  CHECK(pg_geometry_diameter(t, &d) == 0, "%s", pg_context_message(ctx));
  CHECK(isnan(d.value) || (d.seconds >= 0 && d.multiply_adds >= 0), "the costs");
  pg_tensor_free(t);
  return d;
}

static double distance(const float *x, int64_t columns, int64_t a, int64_t b) {
  double sum = 0;
  for (int64_t j = 0; j < columns; j++) {
    double e = (double)x[a * columns + j] - x[b * columns + j];
    sum += e * e;
  }
  return sqrt(sum);
}

/* The library's answer for x against all pairs in fp64. Different orders of the fp64 sum differ by
 * columns * 2^-53 at most: 1e-13 is generous for 128 columns. The pair must attain the value; it
 * must be the smallest that does, unless another is within that rounding. */
static pg_diameter check_brute(const char *what, const float *x, int64_t rows, int64_t columns) {
  double best = 0;
  int64_t first = -1, second = -1;
  pg_diameter d = diameter(x, rows, columns);
  for (int64_t a = 0; a < rows; a++)
    for (int64_t b = a + 1; b < rows; b++) {
      double e = distance(x, columns, a, b);
      if (e > best) best = e, first = a, second = b;
    }
  CHECK(fabs(d.value - best) <= 1e-13 * best, "%s: %.17g, want %.17g (%.3g)", what, d.value, best,
        d.value / best - 1);
  if (best == 0)
    CHECK(d.first == -1 && d.second == -1, "%s: a pair for 0", what);
  else if (d.first != first || d.second != second)
    CHECK(d.first >= 0 && d.first < d.second && d.second < rows &&
              fabs(distance(x, columns, d.first, d.second) - best) <= 1e-13 * best,
          "%s: pair %lld, %lld, want %lld, %lld", what, (long long)d.first, (long long)d.second,
          (long long)first, (long long)second);
  return d;
}

/* ---- values -----------------------------------------------------------------------------------
 */
TEST(published_values) {
  /* REFERENCE A2. Small integers, exact in fp32: only fp64 rounding remains. */
  float a[12] = {1, 2, -1, -2, .5f, 3, 4, -1, 2, 0, 0, 0};
  pg_diameter d = diameter(a, 4, 3);
  CHECK_CLOSE(d.value, 6.264982043070834, 1e-15);
  CHECK(d.first == 1 && d.second == 2, "%lld %lld", (long long)d.first, (long long)d.second);
  for (int i = 0; i < 12; i++) a[i] += (float[]){7, -4, 2}[i % 3];
  d = diameter(a, 4, 3);
  CHECK_CLOSE(d.value, 6.264982043070834, 1e-15);

  float b[15];
  for (int i = 0; i < 15; i++) b[i] = (float)i + 10;
  d = diameter(b, 5, 3);
  CHECK_CLOSE(d.value, 20.784609690826528, 1e-15);
  CHECK(d.first == 0 && d.second == 4, "ends of the line");

  /* Of the rounded inputs: the pair (2, 3), computed here from them. */
  float c[6] = {10, 10, 10 + .0032f, 10, 10, 10 + .0032f};
  d = diameter(c, 3, 2);
  double e = (double)c[2] - c[0], f = (double)c[5] - c[1];
  CHECK_CLOSE(d.value, sqrt(e * e + f * f), 1e-15);
  CHECK_CLOSE(d.value, .0045254834, 2e-4); /* 0.0032 sqrt 2 itself: 10 rounds to 1e-6 */
  CHECK(d.first == 1 && d.second == 2, "the diagonal");

  float g[6] = {0, 0, 3, 4, -3, 4};
  d = diameter(g, 3, 2);
  CHECK(d.value == 6 && d.first == 1 && d.second == 2, "%g", d.value);
}

TEST(zero_has_no_pair) {
  float x[40];
  for (int i = 0; i < 40; i++) x[i] = 0.3f * (float)(i % 4);
  pg_diameter d = diameter(x, 1, 4);
  CHECK(d.value == 0 && d.first == -1 && d.second == -1, "one row");
  d = diameter(x, 10, 4);
  CHECK(d.value == 0 && d.first == -1 && d.second == -1, "identical rows");
  float zero[20] = {0.0f, -0.0f};
  d = diameter(zero, 10, 2);
  CHECK(d.value == 0 && d.first == -1, "zeros of both signs");
}

TEST(ties_take_the_smallest_pair) {
  /* Corners of a square, each twice: four diagonals of the same length. */
  float x[16] = {1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0};
  pg_diameter d = diameter(x, 8, 2);
  CHECK(d.value == sqrt(2) && d.first == 0 && d.second == 1, "%lld %lld", (long long)d.first,
        (long long)d.second);
}

TEST(refusals) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  float x[35 * 7];
  for (int k = 0; k < 3; k++) {
    for (int i = 0; i < 35 * 7; i++) x[i] = (float)(i * i % 17);
    x[23 * 7 + 5] = bad[k];
    pg_tensor *t = upload(x, 35, 7);
    pg_diameter d = {.value = 42};
    CHECK(pg_geometry_diameter(t, &d) == PG_ENONFINITE && d.value == 42, "%g", (double)bad[k]);
    CHECK(strstr(pg_context_message(ctx), "row 23, column 5 "), "%s", pg_context_message(ctx));
    pg_tensor_free(t);
  }
  x[0] = NAN; /* a single row is checked too */
  pg_tensor *t = upload(x, 1, 7);
  pg_diameter d;
  CHECK(pg_geometry_diameter(t, &d) == PG_ENONFINITE, "one row");
  pg_tensor_free(t);

  const struct {
    pg_dtype type;
    int ndim;
    int64_t shape[3];
    const char *says;
  } cases[] = {{PG_I32, 2, {3, 2, 0}, "I32"},    {PG_F64, 2, {3, 2, 0}, "F64"},
               {PG_F32, 1, {3, 0, 0}, "1"},      {PG_F32, 3, {3, 2, 2}, "3"},
               {PG_F32, 2, {0, 2, 0}, "[0, 2]"}, {PG_F32, 2, {3, 0, 0}, "[3, 0]"}};
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    CHECK(pg_tensor_new(ctx, cases[i].type, cases[i].ndim, cases[i].shape, &t) == 0, "new");
    CHECK(pg_geometry_diameter(t, &d) == PG_EINVAL, "case %zu", i);
    CHECK(strstr(pg_context_message(ctx), cases[i].says), "%s", pg_context_message(ctx));
    pg_tensor_free(t);
  }
}

TEST(cancellation) {
  float x[64];
  for (int i = 0; i < 64; i++) x[i] = (float)i;
  pg_tensor *t = upload(x, 16, 4);
  pg_diameter d;
  pg_context_cancel(ctx);
  CHECK(pg_geometry_diameter(t, &d) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  CHECK(pg_geometry_diameter(t, &d) == 0, "resumed");
  pg_tensor_free(t);
}

TEST(views_and_padding) {
  /* Rows and columns of a larger matrix whose rest is 1e4, then NaN (CASES 15). */
  float x[40 * 12], inner[31 * 9];
  pg_normals(1, 1, 0, 31 * 9, inner);
  pg_diameter want = check_brute("inner", inner, 31, 9);
  for (int k = 0; k < 2; k++) {
    for (int i = 0; i < 40 * 12; i++) x[i] = k ? NAN : 1e4f;
    for (int i = 0; i < 31; i++) memcpy(x + (i + 2) * 12 + 1, inner + i * 9, 9 * sizeof *x);
    pg_tensor *t = upload(x, 40, 12), *v = NULL, *transposed = NULL;
    CHECK(pg_tensor_view(t, 2 * 12 + 1, 2, (int64_t[]){31, 9}, (int64_t[]){12, 1}, &v) == 0,
          "view");
    pg_diameter d = {0};
    CHECK(pg_geometry_diameter(v, &d) == 0, "%s", pg_context_message(ctx));
    CHECK(d.value == want.value && d.first == want.first && d.second == want.second, "a view");
    /* The columns' diameter, through a transposed view. */
    float columns[9 * 31];
    for (int i = 0; i < 31 * 9; i++) columns[i % 9 * 31 + i / 9] = inner[i];
    pg_diameter other = check_brute("columns", columns, 9, 31);
    CHECK(pg_tensor_view(v, 0, 2, (int64_t[]){9, 31}, (int64_t[]){1, 12}, &transposed) == 0, "t");
    CHECK(pg_geometry_diameter(transposed, &d) == 0 && d.value == other.value, "transposed");
    pg_tensor_free(transposed);
    pg_tensor_free(v);
    pg_tensor_free(t);
  }
}

/* ---- clouds -----------------------------------------------------------------------------------
 */
#define ROWS 700
#define COLUMNS 40
static float cloud[ROWS * COLUMNS];

/* Gaussian rows; kind 1: unit length, as RowNorm makes them; 2: lengths falling like 1/(i+1); 3:
 * unit length, all but few near one direction, as never-seen tokens' rows are. */
static void make_cloud(uint64_t seed, int64_t rows, int64_t columns, int kind) {
  pg_normals(seed, 17, 0, (size_t)(rows * columns), cloud);
  for (int64_t i = 0; i < rows && kind; i++) {
    float *x = cloud + i * columns;
    double norm = 0;
    for (int64_t j = 0; j < columns; j++) {
      if (kind == 3) x[j] = x[j] * (i % 50 ? .02f : 1) + (i % 50 ? 1 : 0);
      norm += (double)x[j] * x[j];
    }
    double length = kind == 2 ? 1.0 / (double)(i + 1) : 1;
    for (int64_t j = 0; j < columns; j++) x[j] = (float)(x[j] * length / sqrt(norm));
  }
}

TEST(clouds_against_brute_force) {
  const int64_t sizes[][2] = {{2, 1}, {3, 40}, {65, 3}, {129, 17}, {ROWS, COLUMNS}, {500, 2}};
  for (size_t i = 0; i < PG_COUNT(sizes); i++)
    for (int kind = 0; kind < 4; kind++) {
      make_cloud(i, sizes[i][0], sizes[i][1], kind);
      char what[64];
      snprintf(what, sizeof what, "%lldx%lld kind %d", (long long)sizes[i][0],
               (long long)sizes[i][1], kind);
      check_brute(what, cloud, sizes[i][0], sizes[i][1]);
    }
}

TEST(near_ties) {
  /* 120 clouds of unit rows in which 20 pairs are opposite up to some 1e-7: their distances differ
   * in the last fp32 digits only, and the winner must be the one of fp64. Every third is large
   * enough for whatever pruning there is. */
  for (uint64_t seed = 0; seed < 120; seed++) {
    const int64_t rows = seed % 3 ? 160 : ROWS, columns = 24, ties = rows - 40;
    float shift[40 * 24];
    make_cloud(1000 + seed, rows, columns, 1);
    pg_normals(seed, 3, 0, PG_COUNT(shift), shift);
    for (int64_t k = 0; k < 40; k += 2)
      for (int64_t j = 0; j < columns; j++)
        cloud[(ties + k + 1) * columns + j] =
            -cloud[(ties + k) * columns + j] * (1 + 1e-7f * (float)(seed % 5)) +
            2e-4f * shift[k * columns + j];
    check_brute("near ties", cloud, rows, columns);
  }
}

TEST(offsets_scales_and_duplicates) {
  const double scales[] = {1e-24, 1e-12, 1, 1e12, 1e18};
  for (size_t k = 0; k < PG_COUNT(scales); k++)
    for (int kind = 0; kind < 4; kind++) {
      make_cloud(50 + k, 200, 16, kind);
      for (int i = 0; i < 200 * 16; i++) cloud[i] = (float)(cloud[i] * scales[k]);
      char what[64];
      snprintf(what, sizeof what, "scale %g kind %d", scales[k], kind);
      pg_diameter d = check_brute(what, cloud, 200, 16);
      CHECK(d.value > 0, "%s vanished", what);
    }
  for (int k = 0; k < 4; k++) { /* a common offset far above the spread */
    make_cloud(80 + (uint64_t)k, 200, 16, k);
    for (int i = 0; i < 200 * 16; i++) cloud[i] += (k % 2 ? 1e4f : -1e3f) * (float)(i % 16 - 3);
    check_brute("offset", cloud, 200, 16);
  }
  make_cloud(90, 100, 16, 1); /* every row three times */
  memcpy(cloud + 100 * 16, cloud, 100 * 16 * sizeof *cloud);
  memcpy(cloud + 200 * 16, cloud, 100 * 16 * sizeof *cloud);
  pg_diameter d = check_brute("duplicates", cloud, 300, 16);
  CHECK(d.first < 100 && d.second < 100, "the smallest of equal pairs");
  memset(cloud, 0, sizeof cloud); /* one row that differs, by little */
  cloud[77 * 16 + 3] = 1e-30f;
  d = check_brute("one row", cloud, 200, 16);
  CHECK(d.first == 0 && d.second == 77, "%lld %lld", (long long)d.first, (long long)d.second);
}

TEST(same_bits_again) {
  make_cloud(5, ROWS, COLUMNS, 3);
  pg_diameter a = diameter(cloud, ROWS, COLUMNS), b = diameter(cloud, ROWS, COLUMNS);
  CHECK(a.value == b.value && a.first == b.first && a.second == b.second, "repeats");
}

int main(void) {
  char message[256];
  pg_context_options options = {.device = unit_device(), .threads = 2};
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("not ok: %s\n", message);
    return 1;
  }
  RUN(published_values);
  RUN(zero_has_no_pair);
  RUN(ties_take_the_smallest_pair);
  RUN(refusals);
  RUN(cancellation);
  RUN(views_and_padding);
  RUN(clouds_against_brute_force);
  RUN(near_ties);
  RUN(offsets_scales_and_duplicates);
  RUN(same_bits_again);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
