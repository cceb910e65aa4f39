/* Several updates of each optimizer against its equation in plain double loops, with bars that
 * follow the rounding errors. */
#include "core/random.h"
#include "optimizer_job.h"

#include <float.h>

/* ---- the equations in double precision ----------------------------------------------------- */
/* Reference state of one parameter, and beside each number the sum of the magnitudes that went
 * into it: rounding errors are proportional to that, cancellation or not. */
#define CELLS 4096
typedef struct reference {
  int64_t rows, columns, n;
  double g[CELLS], first[CELLS], first_abs[CELLS], second[CELLS], s[CELLS], bar[CELLS];
} reference;
static reference ref;

/* torch's equations, SPEC section 3. Bar: m and v take three roundings per update (two products,
 * one sum) plus one for the rounded beta, each at most U times the magnitude; v's halve in the
 * root; then two corrections, root, sum, quotient, product and lr: 8. */
static void reference_adamw(reference *r, double lr, const double *h) {
  double b1 = h[1], b2 = h[2], eps = h[3];
  r->n++;
  double c1 = 1 - pow(b1, (double)r->n), c2 = 1 - pow(b2, (double)r->n);
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    double g = r->g[i];
    r->first[i] = b1 * r->first[i] + (1 - b1) * g;
    r->first_abs[i] = b1 * r->first_abs[i] + (1 - b1) * fabs(g);
    r->second[i] = b2 * r->second[i] + (1 - b2) * g * g;
    double root = sqrt(r->second[i] / c2) + eps;
    r->s[i] = -lr * (r->first[i] / c1) / root;
    r->bar[i] = lr * (r->first_abs[i] / c1) / root * (6.0 * (double)r->n + 8) * U;
  }
}

static void reference_sgd(reference *r, double lr, const double *h) {
  r->n++;
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    const double share = h[4] != 0 ? 1 - h[1] : 1;
    r->first[i] = h[1] * r->first[i] + share * r->g[i];
    r->first_abs[i] = h[1] * r->first_abs[i] + share * fabs(r->g[i]);
    r->s[i] = -lr * r->first[i];
    r->bar[i] = lr * r->first_abs[i] * (4.0 * (double)r->n + 2) * U;
    if (h[3] != 0) {
      /* The last gradient once more: two products, a sum and the rounded factors. */
      r->s[i] = -lr * (share * r->g[i] + h[1] * r->first[i]);
      r->bar[i] = h[1] * r->bar[i] + 5 * lr * U * (share * fabs(r->g[i]) + r->first_abs[i]);
    }
  }
}

/* x <- x - mean row; the bar grows by the mean of the bars and a rounding of the result. */
static void reference_center(double *x, double *bar, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j++) {
    double mean = 0, mean_bar = 0;
    for (int64_t i = 0; i < rows; i++) {
      mean += x[i * columns + j] / (double)rows;
      mean_bar += bar[i * columns + j] / (double)rows;
    }
    for (int64_t i = 0; i < rows; i++) {
      double *e = &bar[i * columns + j];
      *e += mean_bar + 2 * U * (fabs(x[i * columns + j]) + fabs(mean));
      x[i * columns + j] -= mean;
    }
  }
}

/* Errors e of b move b/||b|| by at most (e + |b| ||e|| / ||b||) / ||b||. */
static void reference_rownorm(reference *r, double lr, const double *h) {
  double beta = h[1], eps = h[2], b[CELLS], e[CELLS];
  int project = (int)h[4];
  r->n++;
  double c = 1 - pow(beta, (double)r->n);
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->first[i] = beta * r->first[i] + (1 - beta) * r->g[i];
    r->first_abs[i] = beta * r->first_abs[i] + (1 - beta) * fabs(r->g[i]);
    b[i] = r->first[i];
    e[i] = 4.0 * (double)r->n * U * r->first_abs[i];
  }
  if (project == 2) reference_center(b, e, r->rows, r->columns);
  for (int64_t i = 0; i < r->rows; i++) {
    double norm = 0, error = 0;
    for (int64_t j = 0; j < r->columns; j++) {
      norm += b[i * r->columns + j] * b[i * r->columns + j];
      error += e[i * r->columns + j] * e[i * r->columns + j];
    }
    double length = sqrt(norm) / c + eps; /* of the corrected row, plus eps */
    double relative = length > eps ? sqrt(error) / c / length : 0;
    for (int64_t j = 0; j < r->columns; j++) {
      int64_t k = i * r->columns + j;
      r->s[k] = -lr * (b[k] / c) / length;
      r->bar[k] = lr * (e[k] / c / length) + fabs(r->s[k]) * (relative + 5 * U);
    }
  }
  if (project > 0) reference_center(r->s, r->bar, r->rows, r->columns);
}

/* Newton-Schulz as published: transpose when tall, A = X X^T. The bar is one for the matrix, in
 * Frobenius norm: the normalised X is off by (3 n + 4) U, each product by U sqrt(n) at most, and a
 * step multiplies what it gets by at most a = 3.4445. */
static double reference_muon(reference *r, double lr, const double *h) {
  double mu = h[1], eps = h[4], frobenius = 0, bar;
  int64_t rows = r->rows, columns = r->columns, cells = rows * columns;
  bool tall = rows > columns;
  int64_t m = tall ? columns : rows, n = tall ? rows : columns;
  static double x[CELLS], a[CELLS], p[CELLS], y[CELLS];
  r->n++;
  for (int64_t i = 0; i < cells; i++) {
    r->first[i] = mu * r->first[i] + r->g[i];
    double d = h[2] != 0 ? r->g[i] + mu * r->first[i] : r->first[i];
    x[tall ? i % columns * rows + i / columns : i] = d;
    frobenius += d * d;
  }
  frobenius = sqrt(frobenius) + eps;
  for (int64_t i = 0; i < cells; i++) x[i] = frobenius > 0 ? x[i] / frobenius : 0;
  bar = (3.0 * (double)r->n + 4) * U;
  for (int step = 0; step < (int)h[3]; step++) {
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        a[i * m + j] = 0;
        for (int64_t k = 0; k < n; k++) a[i * m + j] += x[i * n + k] * x[j * n + k];
      }
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        double square = 0;
        for (int64_t k = 0; k < m; k++) square += a[i * m + k] * a[k * m + j];
        p[i * m + j] = -4.7750 * a[i * m + j] + 2.0315 * square;
      }
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        y[i * n + j] = 3.4445 * x[i * n + j];
        for (int64_t k = 0; k < m; k++) y[i * n + j] += p[i * m + k] * x[k * n + j];
      }
    memcpy(x, y, sizeof x);
    bar = 3.4445 * bar + 8 * U * sqrt((double)m);
  }
  double scale = lr * sqrt(tall ? (double)rows / (double)columns : 1.0);
  for (int64_t i = 0; i < cells; i++)
    r->s[i] = -scale * x[tall ? i % columns * rows + i / columns : i];
  return scale * bar;
}

/* ---- equations ------------------------------------------------------------------------------- */
/* Six updates at changing learning rates, gradients with a few large entries; every increment and
 * the first slot within the bars. */
/* Further options of sgd. */
static const char *also;
static bool mean;

static void run_equation(const char *name, int64_t rows, int64_t columns, const char *hyper,
                         double value) {
  job j = job_new(name, 1, rows, columns);
  set(&j, "lr", 1e-2);
  if (hyper) set(&j, hyper, value);
  if (also) set(&j, also, 1);
  if (mean) set(&j, "average", 1);
  memset(&ref, 0, sizeof ref);
  ref.rows = rows;
  ref.columns = columns;
  double worst = 0;
  for (int update = 0; update < 6; update++) {
    double lr = 1e-2 * (update + 1);
    float noise[CELLS];
    pg_normals(7, pg_hash_name(name), (uint64_t)update * CELLS, CELLS, noise);
    for (int64_t i = 0; i < rows * columns; i++)
      ref.g[i] = (double)noise[i] * (i % 7 == 0 ? 30 : 1);
    write_doubles(j.g[0], ref.g);
    increment(&j, lr);
    float *s = read_floats(j.s[0]);
    if (strcmp(name, "muon") == 0) {
      double bar = reference_muon(&ref, lr, j.hypers), error = 0;
      for (int64_t i = 0; i < rows * columns; i++) error += (s[i] - ref.s[i]) * (s[i] - ref.s[i]);
      worst = fmax(worst, sqrt(error) / bar);
    } else {
      if (strcmp(name, "adamw") == 0) reference_adamw(&ref, lr, j.hypers);
      if (strcmp(name, "sgd") == 0) reference_sgd(&ref, lr, j.hypers);
      if (strcmp(name, "rownorm") == 0) reference_rownorm(&ref, lr, j.hypers);
      for (int64_t i = 0; i < rows * columns; i++)
        worst = fmax(worst, fabs(s[i] - ref.s[i]) / fmax(ref.bar[i], DBL_MIN));
    }
    for (int64_t i = 0; i < rows * columns; i++) CHECK(isfinite(s[i]), "%s: NaN", name);
    free(s);
  }
  CHECK(worst <= 1, "%s %lldx%lld %s: %.3g times the bar", name, (long long)rows,
        (long long)columns, hyper ? hyper : "", worst);
  printf("  %s %lldx%lld %s %g: worst error / bar %.3f\n", name, (long long)rows,
         (long long)columns, hyper ? hyper : "", value, worst);
  float *slot = read_floats(j.slots[0][0]);
  for (int64_t i = 0; i < rows * columns; i++) {
    /* sgd and muon start their sum afresh where |B| ~ |g|; first_abs is not kept for muon. */
    double magnitude = fmax(ref.first_abs[i], fabs(ref.first[i])) + fabs(ref.g[i]);
    CHECK(fabs(slot[i] - ref.first[i]) <= 32 * U * magnitude + 64 * U, "%s slot %lld", name,
          (long long)i);
  }
  free(slot);
  job_free(&j);
}

static const int64_t shapes[][2] = {{1, 9}, {9, 1}, {5, 3}, {3, 5}, {64, 48}, {48, 64}, {1, 1}};

TEST(equation_adamw) {
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    run_equation("adamw", shapes[i][0], shapes[i][1], NULL, 0);
    run_equation("adamw", shapes[i][0], shapes[i][1], "eps", 0.1);
    run_equation("adamw", shapes[i][0], shapes[i][1], "betas", 0);
  }
}
TEST(equation_sgd) {
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    run_equation("sgd", shapes[i][0], shapes[i][1], "momentum", 0);
    run_equation("sgd", shapes[i][0], shapes[i][1], "momentum", 0.9);
    for (int form = 1; form < 4; form++) {
      also = form & 1 ? "nesterov" : NULL, mean = form > 1;
      run_equation("sgd", shapes[i][0], shapes[i][1], "momentum", 0.9);
    }
    also = NULL, mean = false;
  }
}
TEST(equation_rownorm) {
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    for (int project = 0; project < 3; project++)
      /* One row has no part outside the mean: P B = 0 and rounding alone would be normalised. */
      if (project < 2 || shapes[i][0] > 1)
        run_equation("rownorm", shapes[i][0], shapes[i][1], "project", project);
    run_equation("rownorm", shapes[i][0], shapes[i][1], "beta", 0);
    run_equation("rownorm", shapes[i][0], shapes[i][1], "eps", 0.5);
  }
}
TEST(equation_muon) {
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    run_equation("muon", shapes[i][0], shapes[i][1], NULL, 0);
    run_equation("muon", shapes[i][0], shapes[i][1], "nesterov", 0);
    run_equation("muon", shapes[i][0], shapes[i][1], "steps", 0);
    run_equation("muon", shapes[i][0], shapes[i][1], "eps", 3);
  }
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(equation_adamw);
  RUN(equation_sgd);
  RUN(equation_rownorm);
  RUN(equation_muon);
  return job_end();
}
