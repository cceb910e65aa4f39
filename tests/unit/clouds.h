/* Clouds made to break the exact search for the farthest and the nearest pair of rows, on any
 * backend. The file that includes this defines
 *     static void check(const char *name, const float *x, int64_t rows, int64_t d)
 * which compares the backend with cloud_pairs, and CLOUD_ROWS(n), a number of rows like n. */
#ifndef PG_CLOUDS_H
#define PG_CLOUDS_H

#include <stdint.h>

/* The definition: the largest and the smallest |x_i - x_j| in fp64 over all pairs, the smallest
 * pair among equals; lanes as in kernels/cpu/cloud.h. No pair: -1. */
typedef struct cloud_extremes {
  double most, least;
  int64_t far[2], near[2];
} cloud_extremes;

static inline cloud_extremes cloud_pairs(const float *x, int64_t rows, int64_t d) {
  cloud_extremes e = {0, INFINITY, {-1, -1}, {-1, -1}};
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i + 1; j < rows; j++) {
      double lane[8] = {0};
      for (int64_t l = 0; l < d; l++) {
        double difference = (double)x[i * d + l] - (double)x[j * d + l];
        lane[l % 8] += difference * difference;
      }
      double sum =
          ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
      if (sum > e.most) e.most = sum, e.far[0] = i, e.far[1] = j;
      if (sum < e.least) e.least = sum, e.near[0] = i, e.near[1] = j;
    }
  e.most = sqrt(e.most);
  e.least = rows < 2 ? 0 : sqrt(e.least);
  return e;
}

static inline float *cloud_zeros(int64_t rows, int64_t d) {
  float *x = calloc((size_t)(rows * d) + 1, sizeof *x);
  if (!x) abort();
  return x;
}
static inline float *cloud_normal(int64_t rows, int64_t d) {
  float *x = cloud_zeros(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = unit_normal();
  return x;
}
static inline double cloud_norm(const float *x, int64_t d) {
  double square = 0;
  for (int64_t j = 0; j < d; j++) square += (double)x[j] * x[j];
  return sqrt(square);
}

/* Pairs of opposite unit rows, the second of each shorter by up to `spread`: thousands of nearly
 * equal local maxima in which farthest-point sweeps stop, and r_i + r_j excludes nothing. */
static inline float *cloud_opposite(int64_t rows, int64_t d, double spread) {
  float *x = cloud_normal(rows, d);
  for (int64_t i = 0; i + 1 < rows; i += 2) {
    const double norm = cloud_norm(x + i * d, d), shorter = 1 - spread * unit_uniform();
    for (int64_t j = 0; j < d; j++) {
      x[i * d + j] = (float)(x[i * d + j] / norm);
      x[(i + 1) * d + j] = (float)(-shorter * x[i * d + j]);
    }
  }
  return x;
}

TEST(random_clouds) {
  unit_seed(61);
  const int64_t shapes[][2] = {{2, 1}, {3, 1}, {7, 5}, {385, 3}, {769, 18}, {1000, 64}, {1300, 2}};
  for (int c = 0; c < 7; c++) {
    const int64_t rows = c < 3 ? shapes[c][0] : CLOUD_ROWS(shapes[c][0]);
    float *x = cloud_normal(rows, shapes[c][1]);
    check("normal", x, rows, shapes[c][1]);
    free(x);
  }
  float *x = cloud_normal(37, 1023);
  check("wide", x, 37, 1023);
  free(x);
}

/* All rows of norm one: row norms exclude nothing, and pairs are nearly opposite. */
TEST(equal_norms) {
  unit_seed(62);
  for (int c = 0; c < 2; c++) {
    const int64_t rows = CLOUD_ROWS(900), d = c ? 3 : 40;
    float *x = cloud_normal(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      const double norm = cloud_norm(x + i * d, d);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] / norm * 1e-3);
    }
    check("unit rows", x, rows, d);
    free(x);
  }
}

/* Distances differ by less than the error of an fp32 product, so that only the bound on it keeps
 * the true pair among the candidates. */
TEST(near_ties) {
  unit_seed(68);
  for (int c = 0; c < 120; c++) {
    const int64_t rows = CLOUD_ROWS(c < 4 ? 1200 : 160), d = 3 + c % 40 * 5;
    float *x = cloud_opposite(rows, d, c % 2 ? 3e-7 : 1e-4);
    check("opposite rows", x, rows, d);
    free(x);
  }
}

/* Orthonormal rows rounded to fp32: all distances are sqrt 2 within 1e-8. */
TEST(orthonormal_rows) {
  unit_seed(69);
  const int64_t rows = 60, d = 203;
  for (int c = 0; c < 4; c++) {
    double *e = calloc((size_t)(rows * d), sizeof *e);
    float *x = cloud_normal(rows, d);
    if (!e) abort();
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

/* A common offset that is millions of times the spread: a product formula without centring has no
 * digits left. */
TEST(offsets) {
  unit_seed(63);
  const double offsets[] = {1, 1e3, 1e6};
  const int64_t rows = CLOUD_ROWS(700);
  for (int c = 0; c < 3; c++) {
    const int64_t d = 18;
    float *x = cloud_normal(rows, d);
    for (int64_t i = 0; i < rows * d; i++)
      x[i] = (float)(offsets[c] * (1 + (double)(i % d) / 7) + x[i]);
    check("offset", x, rows, d);
    free(x);
  }
  float *x = cloud_normal(rows, 4); /* one coordinate is huge and common, 1e60 times the others */
  for (int64_t i = 0; i < rows * 4; i++) x[i] = i % 4 == 2 ? 1.7e30f : x[i] * 1e-30f;
  check("huge common coordinate", x, rows, 4);
  free(x);
}

TEST(scales) {
  unit_seed(64);
  const double scales[] = {1e-24, 1e-30, 1e-38, 3e-44, 1e30, 5e37};
  for (int c = 0; c < 6; c++) {
    const int64_t rows = CLOUD_ROWS(600), d = 9;
    float *x = cloud_normal(rows, d);
    for (int64_t i = 0; i < rows * d; i++) x[i] = (float)(x[i] * scales[c]);
    check("scale", x, rows, d);
    free(x);
  }
}

/* Rows within rounding of one another: distances are a few units of the last place, and nearly all
 * pairs tie. Then a circle, radii equal to one part in 10^7. */
TEST(rounding_clouds) {
  unit_seed(65);
  const int64_t rows = CLOUD_ROWS(600), d = 6;
  float *x = cloud_zeros(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = 0.7f + (float)(int)(unit_uniform() * 3) * 0x1p-24f;
  check("units of the last place", x, rows, d);
  for (int64_t i = 0; i < rows; i++) {
    const double angle = 6.283185307179586 * (double)i / (double)rows;
    for (int64_t j = 0; j < d; j++) x[i * d + j] = 0;
    x[i * d] = (float)cos(angle), x[i * d + 1] = (float)sin(angle);
  }
  check("circle", x, rows, d);
  free(x);
}

/* The simplex: all pairs tie exactly, the smallest must win; then one row is longer by one unit of
 * the last place. */
TEST(simplex) {
  const int64_t rows = CLOUD_ROWS(600), d = rows;
  float *x = cloud_zeros(rows, d);
  for (int64_t i = 0; i < rows; i++) x[i * d + i] = 1e-3f;
  check("simplex", x, rows, d);
  x[(rows - 7) * d + rows - 7] = nextafterf(1e-3f, 1);
  check("simplex with a longer row", x, rows, d);
  free(x);
}

TEST(duplicates_and_ties) {
  unit_seed(66);
  const int64_t rows = CLOUD_ROWS(1200), d = 8;
  float *x = cloud_normal(rows, d);
  /* Every row four times, scattered: sixteen pairs share the diameter. */
  for (int64_t i = rows / 4; i < rows; i++)
    memcpy(x + i * d, x + (i * 7 % (rows / 4)) * d, (size_t)d * sizeof *x);
  check("duplicates", x, rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = i / d < rows - 200 ? 1 : 2;
  check("two clusters", x, rows, d);
  free(x);
  float signs[] = {0, 1, 5, 5, -0.0f, 1}; /* 0 and -0 are one number */
  check("signed zeros", signs, 3, 2);
}

/* Long tails: a few rows carry the diameter, so row norms exclude nearly everything. */
TEST(long_tails) {
  unit_seed(67);
  for (int c = 0; c < 12; c++) {
    const int64_t rows = CLOUD_ROWS(520 + 61 * c), d = 2 + c;
    float *x = cloud_normal(rows, d);
    for (int64_t i = 0; i < rows; i++) {
      const double length = pow(unit_uniform(), -0.4);
      for (int64_t j = 0; j < d; j++) x[i * d + j] = (float)(x[i * d + j] * length);
    }
    check("long tails", x, rows, d);
    free(x);
  }
}

#define RUN_CLOUDS()                                                                               \
  do {                                                                                             \
    RUN(random_clouds);                                                                            \
    RUN(equal_norms);                                                                              \
    RUN(near_ties);                                                                                \
    RUN(orthonormal_rows);                                                                         \
    RUN(offsets);                                                                                  \
    RUN(scales);                                                                                   \
    RUN(rounding_clouds);                                                                          \
    RUN(simplex);                                                                                  \
    RUN(duplicates_and_ties);                                                                      \
    RUN(long_tails);                                                                               \
  } while (0)

#endif
