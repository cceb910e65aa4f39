/* The farthest pair on the device: the same value, bit for bit, and the same pair as on the CPU and
 * as all pairs in fp64 give, on clouds made to break it. tests/unit/kernels_diameter_test.c says
 * what each cloud is for. */
#include "cuda_unit.h"

/* The definition: the largest |x_i - x_j| in fp64 over all pairs, the smallest pair among equals;
 * lanes as in kernels/cpu/diameter.c. */
static pg_farthest brute_force(const float *x, int64_t rows, int64_t d) {
  pg_farthest best = {0, -1, -1, -1, 0, 0};
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i + 1; j < rows; j++) {
      double lane[8] = {0};
      for (int64_t l = 0; l < d; l++) {
        double difference = (double)x[i * d + l] - (double)x[j * d + l];
        lane[l % 8] += difference * difference;
      }
      double sum =
          ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
      if (sum > best.value) best = (pg_farthest){sum, i, j, -1, 0, 0};
    }
  best.value = sqrt(best.value);
  return best;
}

static pg_farthest check(const char *name, const float *x, int64_t rows, int64_t d) {
  pg_farthest got = {NAN, -7, -7, -7, NAN, NAN}, again = got, cpu = got;
  pg_farthest want = brute_force(x, rows, d);
  int cancel = 0;
  twin t = twin_of(PG_F32, rows * d, x);
  ON(CPU, diameter, P(t), rows, d, &cancel, &cpu);
  ON(GPU, diameter, P(t), rows, d, &cancel, &got);
  CHECK(got.bad_row == -1, "%s: bad row %lld", name, (long long)got.bad_row);
  CHECK(got.value == want.value && got.value == cpu.value, "%s [%lld,%lld]: %.17g, want %.17g",
        name, (long long)rows, (long long)d, got.value, want.value);
  CHECK(got.first == want.first && got.second == want.second, "%s: pair %lld,%lld, want %lld,%lld",
        name, (long long)got.first, (long long)got.second, (long long)want.first,
        (long long)want.second);
  CHECK(fabs(got.radius - cpu.radius) <= 1e-12 * cpu.radius, "%s: radius %.17g, on the CPU %.17g",
        name, got.radius, cpu.radius);
  ON(GPU, diameter, P(t), rows, d, NULL, &again);
  CHECK(memcmp(&got, &again, sizeof got) == 0, "%s: two runs differ", name);
  drop_twins();
  return got;
}

static float *cloud(int64_t rows, int64_t d) {
  float *x = malloc((size_t)(rows * d) * sizeof *x + 1);
  for (int64_t i = 0; i < rows * d; i++) x[i] = unit_normal();
  return x;
}

TEST(random_clouds) {
  unit_seed(31);
  int64_t shapes[][2] = {{2, 1}, {3, 1}, {7, 5}, {128, 16}, {129, 17}, {300, 18}, {37, 1023}};
  for (int c = 0; c < 7; c++) {
    float *x = cloud(shapes[c][0], shapes[c][1]);
    check("normal", x, shapes[c][0], shapes[c][1]);
    free(x);
  }
}

TEST(no_pair) {
  float *x = calloc(300 * 3, sizeof *x);
  for (int rows = 0; rows <= 300; rows += rows < 3 ? 1 : 297) check("zeros", x, rows, 3);
  for (int i = 0; i < 900; i++) x[i] = (float)(i % 3) + 0.1f;
  check("equal rows", x, 300, 3);
  check("no columns", x, 5, 0);
  free(x);
}

TEST(refusals) {
  float x[] = {1, 2, 3, NAN, INFINITY, 6};
  for (int c = 0; c < 2; c++) {
    pg_farthest f = {0};
    twin t = twin_of(PG_F32, 6, x);
    ON(GPU, diameter, P(t), 3, 2, NULL, &f);
    CHECK(f.bad_row == 1 + c && f.first == -1, "bad row %d", (int)f.bad_row);
    x[3] = 0;
  }
  x[4] = 3e38f; /* finite: differences overflow fp32, not fp64 */
  x[0] = -3e38f;
  check("the largest numbers", x, 3, 2);
  pg_farthest f;
  int cancel = 1;
  twin t = twin_of(PG_F32, 6, x);
  CHECK(sides[GPU].k->diameter(sides[GPU].q, t.at[GPU], 3, 2, &cancel, &f) == -1 &&
            strstr(sides[GPU].k->message(sides[GPU].q), "cancel"),
        "%s", sides[GPU].k->message(sides[GPU].q));
  drop_twins();
}

/* Opposite unit rows, one of each pair a little shorter: r_i + r_j excludes nothing, and distances
 * differ by less than the error of an fp32 product, so that only the bound on it keeps the true
 * pair among the candidates. */
TEST(opposite_rows) {
  unit_seed(32);
  for (int c = 0; c < 8; c++) {
    int64_t rows = c < 2 ? 400 : 120, d = 3 + 10 * c;
    float *x = cloud(rows, d);
    for (int64_t i = 0; i < rows; i += 2) {
      double norm = 0, shorter = 1 - (c == 1 ? 1e-4 : 3e-7) * unit_uniform();
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

/* All distances are equal within 1e-8. */
TEST(orthonormal_rows) {
  unit_seed(33);
  int64_t rows = 60, d = 203;
  for (int c = 0; c < 2; c++) {
    double *e = calloc((size_t)(rows * d), sizeof *e);
    float *x = cloud(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      double *row = e + i * d, norm = 0;
      for (int64_t j = 0; j < d; j++) row[j] = x[i * d + j];
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

TEST(offsets_and_scales) {
  unit_seed(34);
  double offsets[] = {1, 1e3, 1e6}, scales[] = {1e-24, 1e-38, 3e-44, 1e30, 5e37};
  int64_t rows = 200, d = 9;
  for (int c = 0; c < 3; c++) {
    float *x = cloud(rows, d);
    for (int64_t i = 0; i < rows * d; i++)
      x[i] = (float)(offsets[c] * (1 + (double)(i % d) / 7) + x[i]);
    check("offset", x, rows, d);
    free(x);
  }
  for (int c = 0; c < 5; c++) {
    float *x = cloud(rows, d);
    for (int64_t i = 0; i < rows * d; i++) x[i] = (float)(x[i] * scales[c]);
    check("scale", x, rows, d);
    free(x);
  }
  float *x = cloud(rows, d); /* one coordinate is huge and common */
  for (int64_t i = 0; i < rows * d; i++) x[i] = i % d == 2 ? 1.7e30f : x[i] * 1e-30f;
  check("huge common coordinate", x, rows, d);
  free(x);
}

TEST(near_ties) {
  unit_seed(35);
  int64_t rows = 300, d = 6;
  float *x = cloud(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = 0.7f + (float)unit_below(3) * 0x1p-24f;
  check("units of the last place", x, rows, d);
  for (int64_t i = 0; i < rows; i++) {
    double angle = 6.283185307179586 * (double)i / (double)rows;
    for (int64_t j = 0; j < d; j++) x[i * d + j] = 0;
    x[i * d] = (float)cos(angle), x[i * d + 1] = (float)sin(angle);
  }
  check("circle", x, rows, d);
  free(x);
  rows = d = 150;
  x = calloc((size_t)(rows * d), sizeof *x);
  for (int64_t i = 0; i < rows; i++) x[i * d + i] = 1e-3f;
  check("simplex", x, rows, d);
  x[97 * d + 97] = nextafterf(1e-3f, 1);
  check("simplex with a longer row", x, rows, d);
  free(x);
}

/* Two values: 278,000 pairs tie, more than the device keeps candidates for. Rows 0 and 1 tie with
 * them, but lie nearer to the mean: the smallest pair is met in a later batch. Then every row four
 * times, scattered. */
TEST(more_ties_than_candidates_fit) {
  unit_seed(36);
  int64_t rows = 1100, d = 2;
  float *x = cloud(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = i / d % 14 < 5 ? 1 : 2;
  x[0] = x[3] = 1, x[1] = x[2] = 2;
  pg_farthest f = check("two clusters", x, rows, d);
  CHECK(f.first == 0 && f.second == 1, "pair %d,%d", (int)f.first, (int)f.second);
  free(x);
  rows = 520, d = 8;
  x = cloud(rows, d);
  for (int64_t i = 130; i < rows; i++)
    memcpy(x + i * d, x + (i * 7 % 130) * d, (size_t)d * sizeof *x);
  check("duplicates", x, rows, d);
  free(x);
}

/* Long tails: a few rows carry the diameter, so row norms exclude nearly everything. */
TEST(pruning_keeps_the_pair) {
  unit_seed(37);
  for (int c = 0; c < 6; c++) {
    int64_t rows = 260 + 61 * c, d = 2 + c;
    float *x = cloud(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      double length = pow(unit_uniform(), -0.4);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] * length);
    }
    check("long tails", x, rows, d);
    free(x);
  }
  int64_t rows = 2000, d = 4;
  float *x = cloud(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] *= i / d % 700 == 77 ? 10 : 0.01f;
  pg_farthest f = check("three long rows", x, rows, d);
  CHECK(f.multiply_adds < 0.05 * (double)rows * (double)rows * (double)d / 2,
        "%g multiply-adds: nothing was left out", f.multiply_adds);
  free(x);
}

int main(void) {
  open_sides();
  RUN(random_clouds);
  RUN(no_pair);
  RUN(refusals);
  RUN(opposite_rows);
  RUN(orthonormal_rows);
  RUN(offsets_and_scales);
  RUN(near_ties);
  RUN(more_ties_than_candidates_fit);
  RUN(pruning_keeps_the_pair);
  return close_sides();
}
