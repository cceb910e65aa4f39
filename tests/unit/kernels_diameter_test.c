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

/* What all pairs cost: panels of 16 rows, that of the diagonal whole. */
static double all_pairs(int64_t rows, int64_t d) {
  const double panels = (double)((rows + 15) / 16);
  return 128 * panels * (panels + 1) * (double)d;
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
  for (int c = 0; c < 6; c++) {
    rows = c % 3 == 0 ? 700 : c % 3 == 1 ? 2500 : 6500;
    d = c < 3 ? 24 : 130;
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

/* Opposite rows of norm one but for `spread` (clouds.h), in a subspace of `dims` dimensions and off
 * it by `noise`: norms leave nothing out, few directions nearly everything. */
static float *flat_cloud(int64_t rows, int64_t d, int64_t dims, double noise, double spread) {
  float *x = cloud_normal(rows, d), *low = cloud_normal(rows, dims), *map = cloud_normal(dims, d);
  for (int64_t i = 0; i < rows; i++) {
    const double shorter = i % 2 ? 1 - spread * unit_uniform() : 1;
    float *row = x + i * d;
    if (i % 2) { /* opposite to the one before */
      for (int64_t j = 0; j < d; j++) row[j] = (float)(-shorter * x[(i - 1) * d + j]);
      continue;
    }
    const double size = noise * cloud_norm(low + i * dims, dims);
    for (int64_t j = 0; j < d; j++) {
      double sum = size * row[j];
      for (int64_t l = 0; l < dims; l++) sum += (double)low[i * dims + l] * map[l * d + j];
      row[j] = (float)sum;
    }
    const double norm = cloud_norm(row, d);
    for (int64_t j = 0; j < d; j++) row[j] = (float)(row[j] / norm);
  }
  free(low), free(map);
  return x;
}

/* The farthest pair against its definition, and with how much work it was found. */
static void check_sieved(const char *name, const float *x, int64_t rows, int64_t d, double share) {
  const cloud_extremes want = cloud_pairs(x, rows, d);
  pg_farthest got;
  KERNEL(diameter, x, rows, d, NULL, &got);
  check_pair(name, &got, want.most, want.far);
  CHECK(got.multiply_adds < share * all_pairs(rows, d), "%s: %.3f of all pairs", name,
        got.multiply_adds / all_pairs(rows, d));
}

/* Twenty per level and number of threads, 120 in all. The distances of hundreds of pairs differ by
 * less than any stage's rounding, which alone decides whether the true one is kept. */
TEST(near_ties_through_the_sieve) {
  unit_seed(1000 + 10 * (uint64_t)strlen(unit_level) + (uint64_t)unit_level[3] + unit_threads);
  for (int c = 0; c < 20; c++) {
    const int64_t rows = 2050 + c, d = 48 + 3 * (c % 10);
    float *x = flat_cloud(rows, d, 2 + c % 3, c % 4 ? 0.01 : 0, c % 2 ? 3e-7 : 1e-5);
    check_sieved("flat", x, rows, d, 0.9);
    free(x);
  }
}

/* Narrow rows (one direction, and none below 16), clouds in fewer dimensions than directions, an
 * offset, tiny and huge scales, duplicates, and one far row beside thousands that are alike. */
TEST(sieve_boundaries) {
  unit_seed(71);
  for (int64_t d = 15; d <= 33; d += d == 17 ? 14 : 1) {
    float *x = flat_cloud(2600, d, 1, 0.02, 1e-6);
    check_sieved("narrow", x, 2600, d, 1.01);
    free(x);
  }
  const int64_t rows = 2403, d = 97;
  for (int c = 0; c < 7; c++) {
    float *x = flat_cloud(rows, d, c == 1 ? 1 : 3, c < 2 ? 0 : 0.01, 1e-4);
    for (int64_t i = 0; i < rows * d; i++) {
      if (c == 2) x[i] = 1e3f + x[i];
      if (c == 3) x[i] *= 1e-24f;
      if (c == 4) x[i] *= 1e37f;
    }
    for (int64_t i = rows / 3; i < rows && c == 5; i++)
      memcpy(x + i * d, x + (i * 7 % (rows / 3)) * d, (size_t)d * sizeof *x);
    for (int64_t i = 0; i < rows * d && c == 6; i++)
      x[i] = i < d ? x[i] : i / d < 5 ? -x[i % d] : 1 + x[i] * 0x1p-22f;
    check_sieved("boundary", x, rows, d, c == 2 || c == 6 ? 1.01 : 0.9);
    free(x);
  }
}

/* Value, pair and work, whatever the number of threads. */
TEST(same_with_any_threads) {
  unit_seed(72);
  const int64_t rows = 5000, d = 64;
  for (int c = 0; c < 2; c++) {
    float *x = c ? cloud_normal(rows, d) : flat_cloud(rows, d, 3, 0.01, 1e-3);
    pg_farthest first[2], got[2];
    for (int threads = 1; threads <= 3; threads++) {
      const pg_queue_options options = {.threads = threads};
      pg_queue *other;
      char why[64];
      CHECK(k->queue_new(&options, &other, why, sizeof why) == 0, "%s", why);
      memset(got, 0, sizeof got);
      CHECK(k->diameter(other, x, rows, d, NULL, got) == 0, "%s", k->message(other));
      CHECK(k->separation(other, x, rows, d, NULL, got + 1) == 0, "%s", k->message(other));
      if (threads == 1) memcpy(first, got, sizeof got);
      CHECK(memcmp(first, got, sizeof got) == 0, "cloud %d: %d threads differ from one", c,
            threads);
      k->queue_free(other);
    }
    free(x);
  }
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(published_values);
    RUN(no_pair);
    RUN(refusals);
    RUN(cost);
    RUN(near_ties_through_the_sieve);
    RUN(sieve_boundaries);
    RUN(same_with_any_threads);
    RUN_CLOUDS();
  }
  return unit_kernels_report();
}
