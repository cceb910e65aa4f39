/* Optimizers of a head that answer to the diameter: equidistant, greedy_radial, exact, and rownorm
 * with a diameter_budget. Their equations in double loops, and what they promise. */
#include "core/random.h"
#include "optimizer_job.h"

#include <float.h>

#define CELLS 16384
static double g_[CELLS], m_[CELLS], m_abs[CELLS];

static double length_of(const double *x, int64_t n) {
  double square = 0;
  for (int64_t i = 0; i < n; i++) square += x[i] * x[i];
  return sqrt(square);
}
static double widest(const float *s, int64_t rows, int64_t columns) {
  double most = 0;
  for (int64_t a = 0; a < rows; a++)
    for (int64_t b = 0; b < a; b++) {
      double square = 0;
      for (int64_t j = 0; j < columns; j++) {
        const double e = (double)s[a * columns + j] - (double)s[b * columns + j];
        square += e * e;
      }
      most = fmax(most, sqrt(square));
    }
  return most;
}
static double closest(const float *s, int64_t rows, int64_t columns) {
  double least = HUGE_VAL;
  for (int64_t a = 0; a < rows; a++)
    for (int64_t b = 0; b < a; b++) {
      double square = 0;
      for (int64_t j = 0; j < columns; j++) {
        const double e = (double)s[a * columns + j] - (double)s[b * columns + j];
        square += e * e;
      }
      least = fmin(least, sqrt(square));
    }
  return least;
}
/* -<G, S>: what a step decreases to first order. */
static double decrease(const double *g, const float *s, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum -= g[i] * (double)s[i];
  return sum;
}
static double sum_of_lengths(const double *g, int64_t rows, int64_t columns) {
  double sum = 0;
  for (int64_t i = 0; i < rows; i++) sum += length_of(g + i * columns, columns);
  return sum;
}
static void center(double *x, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j++) {
    double mean = 0;
    for (int64_t i = 0; i < rows; i++) mean += x[i * columns + j] / (double)rows;
    for (int64_t i = 0; i < rows; i++) x[i * columns + j] -= mean;
  }
}

/* Gradients as a head has them: rows of very different lengths, many nearly parallel, centred. */
static void head_gradient(uint64_t seed, int64_t rows, int64_t columns, double *g) {
  static float noise[CELLS];
  pg_normals(seed, 3, 0, (size_t)(rows * columns), noise);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      const double own = i % 3 == 0 ? 1 : 0.05;
      g[i * columns + j] =
          ((double)noise[i * columns + j] * own + (double)noise[j]) / (1 + (double)i);
    }
  center(g, rows, columns);
  for (int64_t i = 0; i < rows * columns; i++) g[i] = (double)(float)g[i];
}

/* ---- equidistant ------------------------------------------------------------------------------
 */
static double sign_of(uint64_t seed, int64_t epoch, int64_t row, int64_t j, int64_t columns) {
  uint32_t words[4];
  pg_philox(seed, (uint64_t)epoch, (uint64_t)(row * ((columns + 127) / 128) + j / 128), words);
  return words[j % 128 / 32] >> j % 32 & 1 ? -1 : 1;
}
static int rising(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* x and how far each row may be off: a direction by du = 2 ||e|| / ||m|| + 3 U, e the errors of m;
 * with n' = (e - a u) / v and |a| <= sqrt(d), ||e - a u|| = v: ||dn'|| <= 3 d/v^2 du, and as much
 * for each of some 16 roundings. kappa <= 1 moves by half of du, relatively. */
static void equidistant(const job *j, int64_t n, double *x, double *bar) {
  const int64_t rows = j->rows, columns = j->columns;
  const double beta = get(j, "beta", 0), eps = get(j, "eps", 0), d = (double)columns;
  double *lengths = malloc((size_t)rows * sizeof *lengths), q, mean_bar = 0;
  for (int64_t i = 0; i < rows * columns; i++) {
    m_[i] = beta * m_[i] + (1 - beta) * g_[i];
    m_abs[i] = beta * m_abs[i] + (1 - beta) * fabs(g_[i]);
  }
  for (int64_t i = 0; i < rows; i++) lengths[i] = length_of(m_ + i * columns, columns);
  qsort(lengths, (size_t)rows, sizeof *lengths, rising);
  q = lengths[(int64_t)ceil(0.9 * (double)rows) - 1];
  free(lengths);
  for (int64_t i = 0; i < rows; i++) {
    const double *m = m_ + i * columns, a = length_of(m, columns);
    const double du = 8 * (double)n * U * length_of(m_abs + i * columns, columns) / a + 3 * U;
    const double kappa =
        get(j, "adaptive", 0) != 0 ? fmin(1, sqrt(get(j, "share", 0) * q / a)) : get(j, "kappa", 0);
    const double r = a / (a + eps * (1 - pow(beta, (double)n))) / sqrt(1 + kappa * kappa);
    double dot = 0;
    for (int64_t k = 0; k < columns; k++)
      dot += m[k] / a * sign_of((uint64_t)get(j, "seed", 0), (n - 1) / 2, i, k, columns);
    const double v = sqrt(fmax(d - dot * dot, 1e-6 * d)), turn = n % 2 ? 1 : -1;
    for (int64_t k = 0; k < columns; k++) {
      const double u = m[k] / a;
      const double e = sign_of((uint64_t)get(j, "seed", 0), (n - 1) / 2, i, k, columns);
      x[i * columns + k] = r * (u + turn * kappa * (e - dot * u) / v);
    }
    bar[i] = d / (v * v) * (8 * du + 16 * U);
    mean_bar += bar[i] / (double)rows;
  }
  for (int64_t i = 0; i < rows; i++) bar[i] += mean_bar + 4 * U;
  center(x, rows, columns);
}

static void run_equidistant(int64_t rows, int64_t columns, bool adaptive, double kappa) {
  job j = job_new("equidistant", 1, rows, columns);
  static double x[CELLS];
  double *bar = malloc((size_t)rows * sizeof *bar), worst = 0, wide = 0;
  set(&j, "lr", 1);
  set(&j, "adaptive", adaptive);
  set(&j, "kappa", kappa);
  set(&j, "seed", 12345);
  memset(m_, 0, sizeof m_), memset(m_abs, 0, sizeof m_abs);
  for (int n = 1; n <= 5; n++) {
    head_gradient((uint64_t)n, rows, columns, g_);
    write_doubles(j.g[0], g_);
    increment(&j, 0.25);
    equidistant(&j, n, x, bar);
    float *s = read_floats(j.s[0]);
    for (int64_t i = 0; i < rows; i++) {
      double square = 0;
      for (int64_t k = 0; k < columns; k++) {
        const double e = (double)s[i * columns + k] + 0.25 * x[i * columns + k];
        square += e * e;
      }
      worst = fmax(worst, sqrt(square) / (0.25 * bar[i]));
      wide = fmax(wide, bar[i]);
    }
    CHECK(widest(s, rows, columns) <= 0.5 * (1 + 2 * wide), "D = %.9g lr",
          widest(s, rows, columns) / 0.25);
    free(s);
  }
  CHECK(worst <= 1, "%lldx%lld adaptive %d kappa %g: %.3g times the bar", (long long)rows,
        (long long)columns, adaptive, kappa, worst);
  /* A code of another row or update, or of the other sign, is off by kappa: far more. */
  CHECK(wide <= 0.01, "a bar of %g", wide);
  free(bar);
  job_free(&j);
}

TEST(equidistant_equation) {
  run_equidistant(64, 48, false, 0.3);
  run_equidistant(64, 48, true, 0);
  run_equidistant(40, 160, false, 1);
  run_equidistant(30, 300, true, 0);
  run_equidistant(64, 48, false, 0);
}

/* On centred gradients the decrease is RowNorm's over sqrt(1 + kappa^2): each of the rows' products
 * with their code is 0. Rows are off by 24 U d/v^2 (above), and d/v^2 is below 2 here. */
TEST(equidistant_decrease) {
  const int64_t rows = 100, columns = 96;
  for (int k = 0; k < 4; k++) {
    const double kappa = (const double[]){0, 0.1, 0.3, 1}[k];
    job j = job_new("equidistant", 1, rows, columns);
    set(&j, "lr", 1), set(&j, "beta", 0), set(&j, "eps", 1e-30), set(&j, "kappa", kappa);
    head_gradient(9, rows, columns, g_);
    write_doubles(j.g[0], g_);
    increment(&j, 1);
    float *s = read_floats(j.s[0]);
    const double ratio = decrease(g_, s, rows * columns) / sum_of_lengths(g_, rows, columns);
    CHECK(fabs(ratio - 1 / sqrt(1 + kappa * kappa)) <= 100 * U, "kappa %g: %.9g", kappa, ratio);
    free(s);
    job_free(&j);
  }
}

/* A code is taken back in the update after, and another one follows. Nearly parallel rows, which
 * RowNorm moves as one, are kept apart: codes of 30 rows in 96 columns have products of at most
 * 5 / sqrt(96) = 0.51, so that two rows differ by kappa / sqrt(1 + kappa^2) sqrt(2 (1 - 0.51)) of
 * at most 2. */
TEST(equidistant_codes) {
  const int64_t rows = 30, columns = 96, n = rows * columns;
  job j = job_new("equidistant", 1, rows, columns), plain = job_new("rownorm", 1, rows, columns);
  float *s[3];
  set(&j, "lr", 1), set(&j, "beta", 0), set(&plain, "lr", 1), set(&plain, "beta", 0);
  for (int64_t i = 0; i < n; i++)
    g_[i] = (i / columns ? 1 : -29) * (1 + (i % columns) + 1e-4 * (double)(i % 7));
  write_doubles(j.g[0], g_), write_doubles(plain.g[0], g_);
  for (int k = 0; k < 3; k++) increment(&j, 1), s[k] = read_floats(j.s[0]);
  increment(&plain, 1);
  float *r = read_floats(plain.s[0]);
  double back = 0, other = 0, u[96], kappa = 0.3;
  for (int64_t k = 0; k < columns; k++) {
    u[k] = 0;
    for (int64_t i = 0; i < rows; i++) u[k] += (double)r[i * columns + k] / (double)rows;
  }
  for (int64_t i = 0; i < n; i++) {
    const double direction = ((double)r[i] - u[i % columns]) / sqrt(1 + kappa * kappa);
    back = fmax(back, fabs(((double)s[0][i] + (double)s[1][i]) / 2 - direction));
    other = fmax(other, fabs((double)s[2][i] - (double)s[0][i]));
  }
  CHECK(back <= 100 * U, "off by %g after two updates", back);
  CHECK(other > 0.01, "the third code differs by %g", other);
  CHECK(closest(r, rows, columns) < 1e-4, "RowNorm: %g", closest(r, rows, columns));
  CHECK(closest(s[0], rows, columns) >= kappa / sqrt(1 + kappa * kappa) * sqrt(2 * (1 - 0.51)),
        "apart by %g", closest(s[0], rows, columns));
  for (int k = 0; k < 3; k++) free(s[k]);
  free(r);
  job_free(&j), job_free(&plain);
}

/* ---- diameter_budget --------------------------------------------------------------------------
 */
/* D(S) = budget times the schedule's scale, whatever lr: the factor, its product and the rows'
 * differences round, and the step is RowNorm's but for a factor. */
TEST(diameter_budget) {
  const int64_t rows = 40, columns = 24;
  for (int project = 0; project < 3; project++)
    for (int n = 0; n < 4; n++) {
      const double budget = pow(10, -n), lr = n % 2 ? 3 : 1e-3, scale = 0.5 + 0.25 * n;
      job j = job_new("rownorm", 1, rows, columns), plain = job_new("rownorm", 1, rows, columns);
      set(&j, "lr", lr), set(&plain, "lr", lr);
      set(&j, "project", project), set(&plain, "project", project);
      set(&j, "diameter_budget", budget);
      head_gradient((uint64_t)n, rows, columns, g_);
      write_doubles(j.g[0], g_), write_doubles(plain.g[0], g_);
      increment(&j, lr * scale), increment(&plain, lr * scale);
      float *s = read_floats(j.s[0]), *p = read_floats(plain.s[0]);
      CHECK_CLOSE(widest(s, rows, columns), budget * scale, 4 * U);
      const double factor = budget * scale / widest(p, rows, columns);
      for (int64_t i = 0; i < rows * columns; i++)
        CHECK(fabs((double)s[i] - factor * (double)p[i]) <= 4 * U * fabs((double)s[i]),
              "one factor: %g, %g", (double)s[i], (double)p[i]);
      free(s), free(p);
      job_free(&j), job_free(&plain);
    }
  /* No gradient, no diameter; and at scale 0 no step. */
  job j = job_new("rownorm", 1, 4, 3);
  const double zero[12] = {0};
  set(&j, "lr", 1), set(&j, "diameter_budget", 1);
  increment(&j, 1);
  check_matrix("no gradient", j.s[0], zero, 0);
  head_gradient(1, 4, 3, g_);
  write_doubles(j.g[0], g_);
  increment(&j, 0);
  check_matrix("scale 0", j.s[0], zero, 0);
  job_free(&j);
}

/* ---- greedy_radial ----------------------------------------------------------------------------
 */
/* The pass in double precision. Where rounding exchanges the better of two radii or the order of
 * two rows the steps differ and both are right: so what is compared is the sum of t_i ||m_i||. */
static double greedy_sum(const double *g, int64_t rows, int64_t columns) {
  static double phi[CELLS];
  int64_t *order = malloc((size_t)rows * sizeof *order);
  double *a = malloc((size_t)rows * sizeof *a), *t = malloc((size_t)rows * sizeof *t), best = 0;
  for (int64_t i = 0; i < rows; i++) {
    a[i] = length_of(g + i * columns, columns);
    int64_t at = i;
    for (; at > 0 && a[order[at - 1]] < a[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  for (int k = 0; k < 4; k++) {
    const double r0 = (const double[]){0.5, 0.55, 0.6, 0.65}[k];
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) {
      const double *x = g + order[i] * columns;
      t[i] = r0;
      if (a[order[i]] == 0) continue;
      for (int64_t j = 0; j < i; j++) {
        double c = 0;
        for (int64_t l = 0; l < columns; l++) c += x[l] / a[order[i]] * phi[j * columns + l];
        t[i] = fmin(t[i], c + sqrt(c * c + 1 - t[j] * t[j]));
      }
      t[i] = fmax(t[i], 0);
      for (int64_t l = 0; l < columns; l++) phi[i * columns + l] = t[i] * x[l] / a[order[i]];
      sum += t[i] * a[order[i]];
    }
    best = fmax(best, sum);
  }
  free(order), free(a), free(t);
  return best;
}

/* On random and adversarial gradients: D(S) <= 2 lr up to the rounding of products of directions,
 * (d + 8) U, and a decrease of at least RowNorm's, up to that of the lengths, 8 U. */
static void run_greedy(const char *what, const double *g, int64_t rows, int64_t columns,
                       bool rescale) {
  job j = job_new("greedy_radial", 1, rows, columns);
  const double slack = ((double)columns + 8) * U, lr = 0.25;
  set(&j, "lr", 1), set(&j, "beta", 0), set(&j, "eps", 1e-30), set(&j, "rescale", rescale);
  write_doubles(j.g[0], g);
  increment(&j, lr);
  float *s = read_floats(j.s[0]);
  const double d = widest(s, rows, columns), all = sum_of_lengths(g, rows, columns);
  const double got = decrease(g, s, rows * columns) / lr;
  CHECK(d <= 2 * lr * (1 + slack), "%s: D = %.9g lr", what, d / lr);
  CHECK(got >= all * (1 - 8 * U - (rescale ? slack : 0)), "%s: %.9g of RowNorm's", what, got / all);
  if (rescale) {
    CHECK_CLOSE(d, 2 * lr, 4 * U);
  } else {
    /* Rounding of a row's limit moves the limits after it by as much at most, while it is the same
     * row that limits. */
    const double want = 2 * greedy_sum(g, rows, columns);
    CHECK(fabs(got / want - 1) <= (double)rows * slack, "%s: %.9g, want %.9g", what, got, want);
  }
  free(s);
  job_free(&j);
}

TEST(greedy_radial) {
  static float noise[CELLS];
  for (int rescale = 0; rescale < 2; rescale++) {
    for (uint64_t seed = 0; seed < 10; seed++) {
      const int64_t rows = 3 + 11 * (int64_t)seed, columns = 2 + 5 * (int64_t)(seed % 5);
      head_gradient(seed, rows, columns, g_);
      run_greedy("like a head's", g_, rows, columns, rescale);
      pg_normals(seed, 1, 0, (size_t)(rows * columns), noise);
      for (int64_t i = 0; i < rows * columns; i++) g_[i] = (double)noise[i];
      run_greedy("normals", g_, rows, columns, rescale);
      /* Not centred, all of one length and one half space. */
      for (int64_t i = 0; i < rows * columns; i++) g_[i] = fabs((double)noise[i]);
      run_greedy("half a space", g_, rows, columns, rescale);
    }
    /* A long row against many opposite ones: what is given to the first is taken from the others.
     */
    for (int64_t i = 0; i < 400; i++) g_[i] = i < 4 ? 10 : i % 4 == 0 ? -9 : 0;
    run_greedy("one against many", g_, 100, 4, rescale);
    for (int64_t i = 0; i < 400; i++) g_[i] = i / 4 % 2 ? -1 : 1;
    run_greedy("antipodes, ties", g_, 100, 4, rescale);
    memset(g_, 0, sizeof g_);
    for (int64_t i = 0; i < 8; i++) g_[i * 8 + i] = i + 1;
    run_greedy("axes and zero rows", g_, 60, 8, rescale);
  }
}

/* Blocks of rows: the second one answers to the first. */
TEST(greedy_radial_in_blocks) {
  const int64_t rows = 1100, columns = 8;
  head_gradient(4, rows, columns, g_);
  run_greedy("three blocks", g_, rows, columns, false);
}

/* ---- exact ------------------------------------------------------------------------------------
 */
/* S of one update at beta = 0; freed by the caller. */
static float *one_step(const char *name, const char *option, double value, const double *g,
                       int64_t rows, int64_t columns) {
  job j = job_new(name, 1, rows, columns);
  set(&j, "lr", 1), set(&j, "beta", 0);
  if (option) set(&j, option, value);
  write_doubles(j.g[0], g);
  increment(&j, 0.25);
  float *s = read_floats(j.s[0]);
  job_free(&j);
  return s;
}

/* D(S) <= 2 lr: the potential is held below 1 in exact arithmetic, 2 lr is a power of two. The
 * decrease is in [(1 - gap) T, T] times 2 lr where T is known, and at the same diameter not below
 * that of the others: the potential stays below diameter 1 by 2^-21 and its rows were rounded, g's
 * norms in the others too, 8 U; rows of 2e-7 of the norms together may be left out. */
static void run_exact(const char *what, const double *g, int64_t rows, int64_t columns, double gap,
                      double t) {
  const double lr = 0.25, slack = 0x1p-21 + 8 * U + 4e-7;
  const int64_t n = rows * columns;
  float *s = one_step("exact", "gap", gap, g, rows, columns);
  const double got = decrease(g, s, n) / (2 * lr);
  CHECK(widest(s, rows, columns) <= 2 * lr, "%s: D = %.9g lr", what, widest(s, rows, columns) / lr);
  if (t > 0)
    CHECK(got >= t * (1 - gap - slack) && got <= t * (1 + slack), "%s: %.9g of T", what, got / t);
  static const struct {
    const char *name, *option;
    double value;
  } others[] = {{"rownorm", NULL, 0},
                {"rownorm", "diameter_budget", 2},
                {"greedy_radial", NULL, 0},
                {"greedy_radial", "rescale", 1}};
  for (size_t k = 0; k < PG_COUNT(others); k++) {
    float *r = one_step(others[k].name, others[k].option, others[k].value, g, rows, columns);
    const double d = fmax(widest(r, rows, columns), 1e-30);
    const double theirs = decrease(g, r, n) / d;
    CHECK(got >= theirs * (1 - slack), "%s: %.9g of %s's", what, got / theirs, others[k].name);
    free(r);
  }
  free(s);
}

TEST(exact) {
  /* Fermat's point of a triangle with sides 3, 4, 5: T^2 = (9 + 16 + 25)/2 + 2 sqrt(3) area. */
  static const double triangle[] = {3, 0, 0, 4, -3, -4};
  run_exact("Fermat's triangle", triangle, 3, 2, 1e-6, sqrt(25 + 12 * sqrt(3)));
  run_exact("Fermat's triangle", triangle, 3, 2, 0.01, sqrt(25 + 12 * sqrt(3)));
  static const double cross[] = {1, 0, -1, 0, 0, 1, 0, -1};
  run_exact("a cross", cross, 4, 2, 1e-4, 2);
  /* A regular simplex with unit edges: T is half its dimension. */
  for (int k = 2; k <= 16; k += 7) {
    const int d = k + 1;
    for (int i = 0; i < d; i++)
      for (int j = 0; j < d; j++) g_[i * d + j] = ((i == j) - 1.0 / d) * sqrt(0.5);
    run_exact("a simplex", g_, d, d, 1e-4, k / 2.0);
  }
  static float noise[CELLS];
  for (uint64_t seed = 0; seed < 5; seed++) {
    const int64_t rows = 3 + 21 * (int64_t)seed, columns = 2 + 5 * (int64_t)seed;
    head_gradient(seed, rows, columns, g_);
    run_exact("like a head's", g_, rows, columns, 0.01, 0);
    /* A gap with which it takes what it finds first. */
    run_exact("at once", g_, rows, columns, 0.9, 0);
    pg_normals(seed, 1, 0, (size_t)(rows * columns), noise);
    for (int64_t i = 0; i < rows * columns; i++) g_[i] = (double)noise[i];
    center(g_, rows, columns);
    run_exact("normals", g_, rows, columns, 0.01, 0);
  }
}

/* The mean of gradients, whatever their size, in two updates; the same bits again; and no step
 * without differences between rows. */
TEST(exact_momentum) {
  const int64_t rows = 60, columns = 12, n = rows * columns;
  job a = job_new("exact", 1, rows, columns), b = job_new("exact", 1, rows, columns);
  static double mean[CELLS];
  set(&a, "lr", 1), set(&b, "lr", 1), set(&b, "beta", 0);
  memset(mean, 0, sizeof mean);
  for (uint64_t k = 0; k < 2; k++) {
    head_gradient(k, rows, columns, g_);
    write_doubles(a.g[0], g_);
    increment(&a, 0.25);
  }
  float *m = read_floats(a.slots[0][0]), *s = read_floats(a.s[0]);
  CHECK(pg_tensor_write(b.g[0], m) == 0, "write");
  increment(&b, 0.25);
  float *again = read_floats(b.s[0]);
  CHECK(memcmp(s, again, (size_t)n * sizeof *s) == 0, "the step of the momentum");
  free(m), free(s), free(again);
  job_free(&a), job_free(&b);

  const double zero[12] = {0};
  double alike[12];
  for (int i = 0; i < 12; i++) alike[i] = 1 + i % 3;
  job j = job_new("exact", 1, 4, 3);
  set(&j, "lr", 1);
  increment(&j, 1);
  check_matrix("no gradient", j.s[0], zero, 0);
  write_doubles(j.g[0], alike);
  increment(&j, 1);
  check_matrix("rows alike", j.s[0], zero, 0);
  job_free(&j);
}

/* An update is made as a whole: one that is asked to stop still makes the same step, and what asked
 * is told afterwards. */
TEST(exact_is_not_cancelled) {
  head_gradient(3, 50, 8, g_);
  float *s = one_step("exact", NULL, 0, g_, 50, 8);
  pg_context_cancel(ctx);
  float *t = one_step("exact", NULL, 0, g_, 50, 8);
  CHECK(pg_context_cancelled(ctx), "the request is kept");
  pg_context_resume(ctx);
  CHECK(memcmp(s, t, 50 * 8 * sizeof *s) == 0, "the same step");
  free(s), free(t);
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(equidistant_equation);
  RUN(equidistant_decrease);
  RUN(equidistant_codes);
  RUN(diameter_budget);
  RUN(greedy_radial);
  RUN(greedy_radial_in_blocks);
  RUN(exact);
  RUN(exact_momentum);
  RUN(exact_is_not_cancelled);
  return job_end();
}
