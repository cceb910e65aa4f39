/* The farthest pair of rows against all pairs in fp64, on clouds made to break it: ties, near ties,
 * offsets, scales at both ends of fp32, duplicates, equal row norms. */
#include "kernels_unit.h"

/* The definition: the largest |x_i - x_j| evaluated in fp64 over all pairs. */
static double brute_force(const float *x, int64_t rows, int64_t d, int64_t *first,
                          int64_t *second) {
  double best = 0;
  *first = *second = -1;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i + 1; j < rows; j++) {
      double lane[8] = {0};
      for (int64_t l = 0; l < d; l++) {
        double difference = (double)x[i * d + l] - (double)x[j * d + l];
        lane[l % 8] += difference * difference;
      }
      double sum =
          ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
      if (sum > best) best = sum, *first = i, *second = j;
    }
  return sqrt(best);
}

static void check(const char *name, const float *x, int64_t rows, int64_t d) {
  pg_farthest got = {NAN, -7, -7, -7, NAN, NAN}, again = {0};
  int64_t first, second;
  int cancel = 0;
  double want = brute_force(x, rows, d, &first, &second);
  KERNEL(diameter, x, rows, d, &cancel, &got);
  CHECK(got.bad_row == -1, "%s: bad row %lld", name, (long long)got.bad_row);
  CHECK(got.value == want, "%s [%lld,%lld]: %.17g, want %.17g", name, (long long)rows, (long long)d,
        got.value, want);
  CHECK(got.first == first && got.second == second, "%s: pair %lld,%lld, want %lld,%lld", name,
        (long long)got.first, (long long)got.second, (long long)first, (long long)second);
  /* fp64 over some hundred numbers */
  CHECK(got.radius <= want * (1 + 1e-12) && want <= 2 * got.radius * (1 + 1e-12),
        "%s: radius %.17g of the diameter %.17g", name, got.radius, want);
  KERNEL(diameter, x, rows, d, &cancel, &again);
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
  x[4] = 3e38f; /* finite: differences overflow fp32, not fp64 */
  x[0] = -3e38f;
  KERNEL(diameter, x, 3, 2, NULL, &f);
  CHECK_CLOSE(f.value, 6e38, 1e-6);
  int cancel = 1;
  CHECK(k->diameter(q, x, 3, 2, &cancel, &f) == -1 && strstr(k->message(q), "cancel"), "%s",
        k->message(q));
}

static float *random_cloud(int64_t rows, int64_t d) {
  return unit_normals(rows * d, 1);
}

TEST(random_clouds) {
  unit_seed(61);
  int64_t shapes[][2] = {{2, 1}, {3, 1}, {7, 5}, {385, 3}, {769, 18}, {1000, 64}, {1300, 2}};
  for (int c = 0; c < 7; c++) {
    float *x = random_cloud(shapes[c][0], shapes[c][1]);
    check("normal", x, shapes[c][0], shapes[c][1]);
    free(x);
  }
}

/* All rows of norm one: row norms exclude nothing, and pairs are nearly opposite. */
TEST(equal_norms) {
  unit_seed(62);
  for (int c = 0; c < 2; c++) {
    int64_t rows = 900, d = c ? 3 : 40;
    float *x = random_cloud(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      double norm = 0;
      for (int64_t j = 0; j < d; j++) norm += (double)x[i * d + j] * x[i * d + j];
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] / sqrt(norm) * 1e-3);
    }
    check("unit rows", x, rows, d);
    free(x);
  }
}

/* Pairs of opposite rows, one of each a little shorter: thousands of nearly equal local maxima in
 * which farthest-point sweeps stop, and r_i + r_j excludes nothing. */
TEST(opposite_rows) {
  unit_seed(68);
  for (int c = 0; c < 4; c++) {
    int64_t rows = 1200, d = 3 + 5 * c;
    float *x = random_cloud(rows, d);
    for (int64_t i = 0; i < rows; i += 2) {
      double norm = 0, shorter = 1 - (c ? 1e-4 : 3e-7) * unit_uniform();
      for (int64_t j = 0; j < d; j++) norm += (double)x[i * d + j] * x[i * d + j];
      for (int64_t j = 0; j < d; j++) {
        x[i * d + j] = (float)(x[i * d + j] / sqrt(norm));
        x[(i + 1) * d + j] = (float)(-shorter * x[i * d + j]);
      }
    }
    check("opposite rows", x, rows, d);
    free(x);
  }
}

/* Orthonormal rows rounded to fp32: all distances are sqrt 2 within 1e-8, far below the rounding of
 * an fp32 product, so only the slack keeps the true pair among the candidates. */
TEST(orthonormal_rows) {
  unit_seed(69);
  int64_t rows = 60, d = 203;
  for (int c = 0; c < 8; c++) {
    double *e = unit_doubles(rows * d);
    float *x = unit_floats(rows * d);
    for (int64_t i = 0; i < rows; i++) {
      double *row = e + i * d, norm = 0;
      for (int64_t j = 0; j < d; j++) row[j] = unit_normal();
      for (int64_t o = 0; o < i; o++) {
        double dot = 0;
        for (int64_t j = 0; j < d; j++) dot += row[j] * e[o * d + j];
        for (int64_t j = 0; j < d; j++) row[j] -= dot * e[o * d + j];
      }
      for (int64_t j = 0; j < d; j++) norm += row[j] * row[j];
      for (int64_t j = 0; j < d; j++) row[j] /= sqrt(norm);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)row[j];
    }
    check("orthonormal", x, rows, d);
    free(e), free(x);
  }
}

/* A common offset that is millions of times the spread: a product formula without centring has no
 * digits left. */
TEST(offsets) {
  unit_seed(63);
  double offsets[] = {1, 1e3, 1e6};
  for (int c = 0; c < 3; c++) {
    int64_t rows = 700, d = 18;
    float *x = random_cloud(rows, d);
    for (int64_t i = 0; i < rows * d; i++)
      x[i] = (float)(offsets[c] * (1 + (double)(i % d) / 7) + x[i]);
    check("offset", x, rows, d);
    free(x);
  }
  /* One coordinate is huge and common; the others decide at 1e-30 of it. */
  float *x = random_cloud(600, 4);
  for (int64_t i = 0; i < 600; i++) {
    for (int64_t j = 0; j < 4; j++) x[i * 4 + j] *= 1e-30f;
    x[i * 4 + 2] = 1.7e30f;
  }
  check("huge common coordinate", x, 600, 4);
  free(x);
}

TEST(scales) {
  unit_seed(64);
  double scales[] = {1e-24, 1e-38, 3e-44, 1e30, 5e37};
  for (int c = 0; c < 5; c++) {
    int64_t rows = 600, d = 9;
    float *x = random_cloud(rows, d);
    for (int64_t i = 0; i < rows * d; i++) x[i] = (float)(x[i] * scales[c]);
    check("scale", x, rows, d);
    free(x);
  }
}

/* Rows within rounding of one another: distances are a few units of the last place, and nearly all
 * pairs tie. */
TEST(rounding_clouds) {
  unit_seed(65);
  int64_t rows = 600, d = 6;
  float *x = unit_floats(rows * d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = 0.7f + (float)(int)(unit_uniform() * 3) * 0x1p-24f;
  check("units of the last place", x, rows, d);
  /* Almost a sphere: radii equal to one part in 10^7. */
  for (int64_t i = 0; i < rows; i++) {
    double angle = 6.283185307179586 * (double)i / (double)rows;
    for (int64_t j = 0; j < d; j++) x[i * d + j] = 0;
    x[i * d] = (float)cos(angle), x[i * d + 1] = (float)sin(angle);
  }
  check("circle", x, rows, d);
  free(x);
}

/* The simplex: all pairs tie exactly, the smallest must win; then one row is longer by one unit of
 * the last place. */
TEST(simplex) {
  int64_t rows = 800, d = 800;
  float *x = calloc((size_t)(rows * d), sizeof *x);
  for (int64_t i = 0; i < rows; i++) x[i * d + i] = 1e-3f;
  check("simplex", x, rows, d);
  x[523 * d + 523] = nextafterf(1e-3f, 1);
  check("simplex with a longer row", x, rows, d);
  free(x);
}

TEST(duplicates_and_ties) {
  unit_seed(66);
  int64_t rows = 1200, d = 8;
  float *x = random_cloud(rows, d);
  /* Every row four times, scattered: sixteen pairs share the diameter. */
  for (int64_t i = 300; i < rows; i++)
    memcpy(x + i * d, x + (i * 7 % 300) * d, (size_t)d * sizeof *x);
  check("duplicates", x, rows, d);
  /* Two values only. */
  for (int64_t i = 0; i < rows * d; i++) x[i] = i / d < 1000 ? 1 : 2;
  check("two clusters", x, rows, d);
  free(x);
}

/* Long tails: a few rows carry the diameter, so that row norms exclude nearly everything. */
TEST(pruning_keeps_the_pair) {
  unit_seed(67);
  for (int c = 0; c < 20; c++) {
    int64_t rows = 520 + 37 * c, d = 2 + c;
    float *x = random_cloud(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      double length = pow(unit_uniform(), -0.4);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] * length);
    }
    check("long tails", x, rows, d);
    free(x);
  }
  int64_t rows = 4000, d = 16;
  float *x = random_cloud(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] *= i / d % 1000 == 77 ? 10 : 0.01f;
  pg_farthest f;
  KERNEL(diameter, x, rows, d, NULL, &f);
  /* Four long rows: the sweeps cost 32 rows d, the tiles next to nothing. */
  CHECK(f.multiply_adds < 0.05 * (double)rows * (double)rows * (double)d / 2,
        "%g multiply-adds: nothing was left out", f.multiply_adds);
  free(x);
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(published_values);
    RUN(no_pair);
    RUN(refusals);
    RUN(random_clouds);
    RUN(equal_norms);
    RUN(opposite_rows);
    RUN(orthonormal_rows);
    RUN(offsets);
    RUN(scales);
    RUN(rounding_clouds);
    RUN(simplex);
    RUN(duplicates_and_ties);
    RUN(pruning_keeps_the_pair);
  }
  return unit_kernels_report();
}
