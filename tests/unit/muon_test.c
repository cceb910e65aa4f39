/* Muon's Newton-Schulz steps in both precisions: the singular values they leave, and what rounding
 * to bf16 changes. PG_TEST_DEVICE=cuda: on another device. */
#include "core/random.h"
#include "optimizer_job.h"

/* One step, x <- a x + b x^3 + c x^5, takes a singular value where it takes this number. */
static double step(double x) {
  return 3.4445 * x - 4.7750 * x * x * x + 2.0315 * x * x * x * x * x;
}
static double five_steps(double x) {
  for (int k = 0; k < 5; k++) x = step(x);
  return x;
}

/* Singular values of x [rows, columns] by one-sided Jacobi rotations of its shorter side's rows,
 * into sigma[min(rows, columns)], in no order. */
static void singular_values(const float *x, int64_t rows, int64_t columns, double *sigma) {
  const int64_t m = rows < columns ? rows : columns, n = rows + columns - m;
  double *r = malloc((size_t)(m * n) * sizeof *r);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) r[i * n + j] = rows <= columns ? x[i * n + j] : x[j * m + i];
  for (int sweep = 0; sweep < 40; sweep++) {
    double off = 0;
    for (int64_t p = 0; p < m; p++)
      for (int64_t q = p + 1; q < m; q++) {
        double a = 0, b = 0, c = 0;
        for (int64_t j = 0; j < n; j++) {
          a += r[p * n + j] * r[p * n + j];
          b += r[q * n + j] * r[q * n + j];
          c += r[p * n + j] * r[q * n + j];
        }
        off = fmax(off, fabs(c) / (sqrt(a * b) + 1e-300));
        if (fabs(c) <= 1e-15 * sqrt(a * b)) continue;
        double zeta = (b - a) / (2 * c), t = copysign(1, zeta) / (fabs(zeta) + hypot(1, zeta));
        double cosine = 1 / hypot(1, t), sine = cosine * t;
        for (int64_t j = 0; j < n; j++) {
          double u = r[p * n + j], v = r[q * n + j];
          r[p * n + j] = cosine * u - sine * v;
          r[q * n + j] = sine * u + cosine * v;
        }
      }
    if (off < 1e-13) break;
  }
  for (int64_t i = 0; i < m; i++) {
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += r[i * n + j] * r[i * n + j];
    sigma[i] = sqrt(sum);
  }
  free(r);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* `count` matrices with the gradients g; S is X itself. */
static job muon(size_t count, int64_t rows, int64_t columns, const float *g,
                const char *precision) {
  job j = job_new("muon", count, rows, columns);
  const pg_hyper *h;
  set(&j, "lr", 1);
  int index = pg_optimizer_hyper_index(j.o, "precision", &h);
  while (strcmp(h->choices[(int)j.hypers[index]], precision) != 0) j.hypers[index]++;
  for (size_t i = 0; i < count; i++)
    CHECK(pg_tensor_write(j.g[i], g + (int64_t)i * rows * columns) == 0, "write");
  return j;
}
static double unit_rate(int64_t rows, int64_t columns) {
  return -1 / sqrt(rows > columns ? (double)rows / (double)columns : 1);
}

/* ||x - y|| / ||y|| */
static double distance(const float *x, const float *y, int64_t n) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < n; i++) {
    error += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    size += (double)y[i] * y[i];
  }
  return sqrt(error / size);
}

/* What rounding to bf16 may change, as a share of ||X||. With u = 2^-8, storing X, A and
 * P = b A + c A A moves each by u of its norm at most. Around the root mean square 0.88 of the
 * singular values, s^2 = 0.77, that moves X' by u, |b + 2 c s^2| u = 1.6 u and |b s^2 + c s^4| u =
 * 2.5 u; the steps' errors are independent and a step passes on what came before with a mean slope
 * below 1. The rounding is then small beside what the steps themselves leave: singular values that
 * differ from 1 by 0.21 in root mean square. */
#define ROUNDING (sqrt(5) * 5.1 * 0x1p-8) /* 4.5 % */

/* Five steps take [0.002, 1] into this band. */
#define BAND_FROM 0.6818
#define BAND_TO 1.2024

TEST(precisions) {
  static const int64_t shapes[][2] = {{64, 64}, {48, 160}, {160, 48}, {96, 33}, {7, 9}, {128, 128}};
  for (size_t s = 0; s < PG_COUNT(shapes); s++) {
    const int64_t rows = shapes[s][0], columns = shapes[s][1], n = rows * columns;
    const int64_t m = rows < columns ? rows : columns;
    float *g = malloc((size_t)n * sizeof *g);
    double start[128], want[128], wide[128], narrow[128], norm = 0, worst = 0, worst_narrow = 0;
    pg_normals(31, s, 0, n, g);
    for (int64_t i = 0; i < n; i++) norm += (double)g[i] * g[i];
    job full = muon(1, rows, columns, g, "fp32"), half = muon(1, rows, columns, g, "bf16");
    increment(&full, unit_rate(rows, columns));
    increment(&half, unit_rate(rows, columns));
    float *x = read_floats(full.s[0]), *y = read_floats(half.s[0]);
    const double off = distance(y, x, n);
    CHECK(off <= ROUNDING && off > 0x1p-9, "bf16 is %.4f off", off);

    singular_values(g, rows, columns, start);
    singular_values(x, rows, columns, wide);
    singular_values(y, rows, columns, narrow);
    /* The direction of the first Nesterov update is (1 + mu) g. */
    for (int64_t i = 0; i < m; i++) start[i] *= 1.95 / (1.95 * sqrt(norm) + 1e-5);
    for (int64_t i = 0; i < m; i++) want[i] = five_steps(start[i]);
    qsort(want, (size_t)m, sizeof *want, ascending);
    qsort(wide, (size_t)m, sizeof *wide, ascending);
    qsort(narrow, (size_t)m, sizeof *narrow, ascending);
    int64_t small = 0; /* values that five steps do not lift into the band */
    for (int64_t i = 0; i < m; i++) small += start[i] < 0.002;
    for (int64_t i = 0; i < m; i++) {
      worst = fmax(worst, fabs(wide[i] - want[i]));
      worst_narrow = fmax(worst_narrow, fabs(narrow[i] - want[i]));
      const double from = i < small ? 0 : BAND_FROM;
      CHECK(wide[i] >= from - 1e-3 && wide[i] <= BAND_TO + 1e-3, "fp32 leaves %.4f", wide[i]);
      CHECK(narrow[i] >= from - ROUNDING && narrow[i] <= BAND_TO + ROUNDING, "bf16 leaves %.4f",
            narrow[i]);
    }
    /* Some roundings of fp32, of which the steepest slope of five steps, 485, makes this much. */
    CHECK(worst <= 485 * 8 * U, "fp32 is %.2g off the numbers' own iteration", worst);
    CHECK(worst_narrow <= BAND_TO * ROUNDING, "bf16 is %.2g off", worst_narrow);
    printf("  [%lld,%lld]: bf16 differs by %.4f; singular values %.3f to %.3f, in bf16 %.3f to "
           "%.3f, off by %.4f\n",
           (long long)rows, (long long)columns, off, wide[0], wide[m - 1], narrow[0], narrow[m - 1],
           worst_narrow);
    free(g), free(x), free(y);
    job_free(&full), job_free(&half);
  }
}

/* In a group, decayed and applied at once, as alone. */
TEST(groups) {
  static const char *const precisions[] = {"fp32", "bf16"};
  static const int64_t shapes[][2] = {{24, 40}, {33, 21}};
  for (int c = 0; c < 4; c++) {
    const int64_t rows = shapes[c / 2][0], columns = shapes[c / 2][1], n = rows * columns;
    float *g = malloc((size_t)(5 * n) * sizeof *g);
    pg_normals(32, (uint64_t)c, 0, 5 * n, g);
    job all = muon(5, rows, columns, g, precisions[c % 2]);
    set(&all, "weight_decay", 50);
    for (size_t i = 0; i < 5; i++) CHECK(pg_tensor_copy(all.w[i], all.g[i]) == 0, "copy");
    update(&all, 1e-3, true, true);
    for (size_t i = 0; i < 5; i++) {
      job one = muon(1, rows, columns, g + (int64_t)i * n, precisions[c % 2]);
      increment(&one, 1e-3);
      float *s = read_floats(all.s[i]), *alone = read_floats(one.s[0]), *w = read_floats(all.w[i]);
      /* Sums of another order may round differently. */
      CHECK(distance(s, alone, n) <= (c % 2 ? ROUNDING : 485 * 8 * U), "matrix %zu", i);
      int64_t wrong = 0;
      for (int64_t k = 0; k < n; k++) {
        float kept = 0.95f * g[(int64_t)i * n + k];
        wrong += w[k] != kept + s[k];
      }
      CHECK(!wrong, "%lld weights", (long long)wrong);
      free(s), free(alone), free(w);
      job_free(&one);
    }
    free(g);
    job_free(&all);
  }
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(precisions);
  RUN(groups);
  return job_end();
}
