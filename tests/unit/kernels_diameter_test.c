/* The farthest and the nearest pair of rows against all pairs in fp64, on the clouds of clouds.h.
 */
#include "kernels_unit.h"

#define CLOUD_ROWS(n) (n)
static void check(const char *name, const float *x, int64_t rows, int64_t d);
#include "clouds.h"

/* One search against its definition. */
static void check_pair(const char *name, const pg_farthest *got, double want, const int64_t *pair) {
  CHECK(got->bad_row == -1, "%s: bad row %lld", name, (long long)got->bad_row);
  CHECK(got->value == want, "%s: %.17g, want %.17g", name, got->value, want);
  CHECK(got->first == pair[0] && got->second == pair[1], "%s: pair %lld,%lld, want %lld,%lld", name,
        (long long)got->first, (long long)got->second, (long long)pair[0], (long long)pair[1]);
}

static void check(const char *name, const float *x, int64_t rows, int64_t d) {
  pg_farthest got = {NAN, -7, -7, -7, NAN, NAN}, again = got;
  const cloud_extremes want = cloud_pairs(x, rows, d);
  int cancel = 0;
  KERNEL(diameter, x, rows, d, &cancel, &got);
  check_pair(name, &got, want.most, want.far);
  /* fp64 over some hundred numbers */
  CHECK(got.radius <= want.most * (1 + 1e-12) && want.most <= 2 * got.radius * (1 + 1e-12),
        "%s: radius %.17g of the diameter %.17g", name, got.radius, want.most);
  KERNEL(diameter, x, rows, d, NULL, &again);
  CHECK(memcmp(&got, &again, sizeof got) == 0, "%s: two runs differ", name);
  KERNEL(separation, x, rows, d, &cancel, &got);
  check_pair(name, &got, want.least, want.near);
  KERNEL(separation, x, rows, d, NULL, &again);
  CHECK(memcmp(&got, &again, sizeof got) == 0, "%s: two runs differ", name);
}

TEST(published_values) {
  float a[] = {1, 2, -1, -2, .5f, 3, 4, -1, 2, 0, 0, 0}, b[15];
  pg_farthest f;
  for (int shift = 0; shift < 2; shift++) {
    KERNEL(diameter, a, 4, 3, NULL, &f);
    CHECK_CLOSE(f.value, 6.264982043070834, 1e-15);
    CHECK(f.first == 1 && f.second == 2 && f.bad_row == -1, "pair %d %d", (int)f.first,
          (int)f.second);
    for (int i = 0; i < 12; i++) a[i] += i % 3 == 0 ? 7 : i % 3 == 1 ? -4 : 2;
  }
  for (int i = 0; i < 15; i++) b[i] = (float)i + 10;
  KERNEL(diameter, b, 5, 3, NULL, &f);
  CHECK_CLOSE(f.value, 20.784609690826528, 1e-15);
  CHECK(f.first == 0 && f.second == 4, "pair %d %d", (int)f.first, (int)f.second);
  /* Of the rounded inputs: 10.0032f and 10 differ by 3.2e-3 within half a unit of 10. */
  float c[] = {10, 10, 10.0032f, 10, 10, 10.0032f};
  double side = (double)10.0032f - 10;
  KERNEL(diameter, c, 3, 2, NULL, &f);
  CHECK_CLOSE(f.value, side * sqrt(2), 1e-15);
  CHECK(f.first == 1 && f.second == 2, "pair %d %d", (int)f.first, (int)f.second);
  float e[] = {0, 0, 3, 4, -3, 4};
  KERNEL(diameter, e, 3, 2, NULL, &f);
  CHECK(f.value == 6 && f.first == 1 && f.second == 2, "%g", f.value);
}

TEST(no_pair) {
  float same[] = {3, 4, 3, 4, 3, 4, 0, 0};
  pg_farthest f;
  for (int rows = 0; rows <= 3; rows++) {
    KERNEL(diameter, same, rows, 2, NULL, &f);
    CHECK(f.value == 0 && f.first == -1 && f.second == -1 && f.bad_row == -1, "%d rows: %g %d",
          rows, f.value, (int)f.first);
    KERNEL(separation, same, rows, 2, NULL, &f); /* two rows are a pair, alike or not */
    CHECK(f.value == 0 && f.first == (rows < 2 ? -1 : 0) && f.second == (rows < 2 ? -1 : 1),
          "%d rows: %g %d %d", rows, f.value, (int)f.first, (int)f.second);
  }
  float zeros[700 * 3] = {0};
  KERNEL(diameter, zeros, 700, 3, NULL, &f);
  CHECK(f.value == 0 && f.first == -1, "zeros: %g", f.value);
}

TEST(refusals) {
  float x[] = {1, 2, 3, NAN, INFINITY, 6};
  pg_farthest f;
  KERNEL(diameter, x, 3, 2, NULL, &f);
  CHECK(f.bad_row == 1 && f.first == -1, "bad row %d", (int)f.bad_row);
  x[3] = 0;
  KERNEL(diameter, x, 3, 2, NULL, &f);
  CHECK(f.bad_row == 2, "bad row %d", (int)f.bad_row);
  KERNEL(separation, x, 3, 2, NULL, &f);
  CHECK(f.bad_row == 2 && f.first == -1, "bad row %d", (int)f.bad_row);
  x[4] = 3e38f; /* finite: differences overflow fp32, not fp64 */
  x[0] = -3e38f;
  KERNEL(diameter, x, 3, 2, NULL, &f);
  CHECK_CLOSE(f.value, 6e38, 1e-6);
  int cancel = 1;
  CHECK(k->diameter(q, x, 3, 2, &cancel, &f) == -1 && strstr(k->message(q), "cancel"), "%s",
        k->message(q));
  CHECK(k->separation(q, x, 3, 2, &cancel, &f) == -1 && strstr(k->message(q), "cancel"), "%s",
        k->message(q));
}

/* What all pairs cost: tiles of 384 rows, those of the diagonal whole. */
static double all_pairs(int64_t rows, int64_t d) {
  double work = 0;
  for (int64_t i = 0; i < rows; i += 384)
    for (int64_t j = i; j < rows; j += 384)
      work += fmin(384, (double)(rows - i)) * fmin(384, (double)(rows - j)) * (double)d;
  return work;
}

TEST(cost) {
  unit_seed(70);
  /* Four long rows leave nearly everything out. */
  int64_t rows = 4000, d = 16;
  pg_farthest f;
  float *x = cloud_normal(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] *= i / d % 1000 == 77 ? 10 : 0.01f;
  KERNEL(diameter, x, rows, d, NULL, &f);
  CHECK(f.multiply_adds < 0.05 * all_pairs(rows, d), "%g multiply-adds: nothing was left out",
        f.multiply_adds);
  free(x);
  /* Unit rows: nothing can be left out, and trying costs at most one in a hundred. */
  for (int c = 0; c < 3; c++) {
    rows = c == 0 ? 700 : c == 1 ? 2500 : 6500;
    d = 24;
    x = cloud_normal(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      const double norm = cloud_norm(x + i * d, d);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] / norm);
    }
    KERNEL(diameter, x, rows, d, NULL, &f);
    CHECK(f.multiply_adds <= 1.01 * all_pairs(rows, d), "%lld rows: %.4f of all pairs",
          (long long)rows, f.multiply_adds / all_pairs(rows, d));
    free(x);
  }
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(published_values);
    RUN(no_pair);
    RUN(refusals);
    RUN(cost);
    RUN_CLOUDS();
  }
  return unit_kernels_report();
}
