/* Optimizers with factors of a side: Shampoo, SOAP and K-FAC. Shampoo and K-FAC against their
 * equations with eigenvectors by Jacobi's rotations; SOAP by what it is in a basis that is known.
 */
#include "core/random.h"
#include "optimizer_job.h"

#include <float.h>

#define SIDE 24
typedef double square[SIDE][SIDE];

/* a = q diag(w) q^T by cyclic Jacobi rotations, to fp64's rounding. */
static void eigen(int n, square a, square q, double *w) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) q[i][j] = i == j;
  for (int sweep = 0; sweep < 60; sweep++)
    for (int i = 0; i < n; i++)
      for (int j = i + 1; j < n; j++) {
        if (a[i][j] == 0) continue;
        const double theta = (a[j][j] - a[i][i]) / (2 * a[i][j]);
        const double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
        const double c = 1 / sqrt(t * t + 1), s = t * c;
        for (int k = 0; k < n; k++) {
          const double x = a[k][i], y = a[k][j];
          a[k][i] = c * x - s * y, a[k][j] = s * x + c * y;
        }
        for (int k = 0; k < n; k++) {
          const double x = a[i][k], y = a[j][k];
          a[i][k] = c * x - s * y, a[j][k] = s * x + c * y;
        }
        for (int k = 0; k < n; k++) {
          const double x = q[k][i], y = q[k][j];
          q[k][i] = c * x - s * y, q[k][j] = s * x + c * y;
        }
      }
  for (int i = 0; i < n; i++) w[i] = a[i][i];
}

/* out = (max(w, floor max w) + shift mean w)^-power of a; *condition: the largest over the least
 * of what was raised. */
static void inverse_power(int n, const square a, double floor, double shift, double power,
                          square out, double *condition) {
  static square copy, q;
  double w[SIDE], most = 0, mean = 0, least = HUGE_VAL, top = 0;
  memcpy(copy, a, sizeof copy);
  eigen(n, copy, q, w);
  for (int i = 0; i < n; i++) most = fmax(most, w[i]), mean += w[i] / n;
  for (int i = 0; i < n; i++) {
    w[i] = fmax(w[i], floor * most) + shift * mean;
    least = fmin(least, w[i]), top = fmax(top, w[i]);
  }
  *condition = top / least;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      out[i][j] = 0;
      for (int k = 0; k < n; k++) out[i][j] += q[i][k] * pow(w[k], -power) * q[j][k];
    }
}

static square g_, m_, left, right, x_, y_, root;

static void product(int m, int k, int n, const square a, const square b, square c) {
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      c[i][j] = 0;
      for (int l = 0; l < k; l++) c[i][j] += a[i][l] * b[l][j];
    }
}
static double norm(int m, int n, const square a) {
  double sum = 0;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) sum += a[i][j] * a[i][j];
  return sqrt(sum);
}
static void draw(uint64_t seed, int m, int n, square a) {
  float noise[SIDE * SIDE];
  pg_normals(seed, 5, 0, (size_t)(m * n), noise);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) a[i][j] = (double)noise[i * n + j];
}
static void put(pg_tensor *t, int m, int n, const square a) {
  double flat[SIDE * SIDE];
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) flat[i * n + j] = a[i][j];
  write_doubles(t, flat);
}
/* ||S + lr X||_F / lr. */
static double off_by(const pg_tensor *s, double lr, int m, int n, const square x) {
  float *f = read_floats(s);
  double sum = 0;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      const double e = (double)f[i * n + j] / lr + x[i][j];
      sum += isfinite(e) ? e * e : HUGE_VAL;
    }
  free(f);
  return sqrt(sum);
}

/* A factor is off by (4 n + side) U of its norm and more by none of its roundings, so that its
 * smallest eigenvalue is by `condition` times that, relatively, and a power p <= 1 by p times it;
 * products add side U. All relative to ||L^-p|| ||M|| ||R^-p|| at most, in spectral norms, for
 * which Frobenius norms are taken. */
static void run_shampoo(int m, int n, bool one_sided) {
  job j = job_new("shampoo", 1, m, n);
  const double b1 = 0.9, b2 = 0.95, eps = 1e-3;
  double worst = 0, wide = 0, condition = 1, c, relative;
  static square l_root, r_root;
  set(&j, "eps", eps), set(&j, "one_sided", one_sided), set(&j, "every", 2);
  memset(m_, 0, sizeof m_), memset(left, 0, sizeof left), memset(right, 0, sizeof right);
  for (int t = 1; t <= 5; t++) {
    draw((uint64_t)t, m, n, g_);
    put(j.g[0], m, n, g_);
    increment(&j, 0.5);
    for (int i = 0; i < m; i++)
      for (int k = 0; k < n; k++) m_[i][k] = b1 * m_[i][k] + (1 - b1) * (double)(float)g_[i][k];
    for (int i = 0; i < m; i++)
      for (int k = 0; k < m; k++) {
        double sum = 0;
        for (int a = 0; a < n; a++) sum += (double)(float)g_[i][a] * (double)(float)g_[k][a];
        left[i][k] = b2 * left[i][k] + (1 - b2) * sum;
      }
    for (int i = 0; i < n; i++)
      for (int k = 0; k < n; k++) {
        double sum = 0;
        for (int a = 0; a < m; a++) sum += (double)(float)g_[a][i] * (double)(float)g_[a][k];
        right[i][k] = b2 * right[i][k] + (1 - b2) * sum;
      }
    if (t % 2 == 1) {
      const double power = one_sided ? 0.5 : 0.25;
      inverse_power(n, right, eps, 0, power, r_root, &condition);
      if (!one_sided) inverse_power(m, left, eps, 0, power, l_root, &c), condition += c;
    }
    memcpy(x_, m_, sizeof x_);
    if (!one_sided) product(m, m, n, l_root, m_, x_);
    product(m, n, n, x_, r_root, y_);
    relative = (condition * (4 * t + SIDE) + 4 * SIDE) * U;
    const double size = norm(m, n, m_) * norm(n, n, r_root) * (one_sided ? 1 : norm(m, m, l_root));
    worst = fmax(worst, off_by(j.s[0], 0.5, m, n, y_) / (relative * size));
    wide = fmax(wide, relative * size / norm(m, n, y_));
  }
  CHECK(worst <= 1, "%dx%d: %.3g times the bar", m, n, worst);
  /* Another power or side changes S by more than a tenth. */
  CHECK(wide <= 0.1, "%dx%d: a bar of %g", m, n, wide);
  printf("  shampoo %dx%d: worst error / bar %.3f, bar %.2g\n", m, n, worst, wide);
  job_free(&j);
}

TEST(shampoo) {
  run_shampoo(6, 6, false);
  run_shampoo(24, 8, true);
  run_shampoo(8, 12, false);
  run_shampoo(12, 5, false);
}

/* A side above the limit has no factor: S = -lr M R^-1/2 whatever one_sided says. */
TEST(long_sides_have_no_factor) {
  static const char *const names[] = {"shampoo", "soap"};
  for (int k = 0; k < 2; k++) {
    job a = job_new(names[k], 1, PG_FACTOR_LIMIT + 1, 3);
    job b = job_new(names[k], 1, PG_FACTOR_LIMIT + 1, 3);
    const size_t n = 3 * (PG_FACTOR_LIMIT + 1);
    float *g = malloc(n * sizeof *g);
    set(&b, "one_sided", 1);
    for (int t = 0; t < 3; t++) {
      pg_normals(2, 2, (uint64_t)t * n, n, g);
      CHECK(pg_tensor_write(a.g[0], g) == 0 && pg_tensor_write(b.g[0], g) == 0, "write");
      increment(&a, 1), increment(&b, 1);
    }
    float *x = read_floats(a.s[0]), *y = read_floats(b.s[0]);
    CHECK(memcmp(x, y, n * sizeof *x) == 0 && x[0] != 0, "%s", names[k]);
    free(g), free(x), free(y);
    job_free(&a), job_free(&b);
  }
}

/* ---- SOAP ------------------------------------------------------------------------------------ */
/* Orthogonal, from the eigenvectors of a random symmetric matrix. */
static void orthogonal(uint64_t seed, int n, square q) {
  static square a;
  double w[SIDE];
  draw(seed, n, n, a);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < i; k++) a[i][k] = a[k][i];
  eigen(n, a, q, w);
}

/* Gradients A diag(D_t) B^T with A and B orthogonal have A and B for bases, which stay: SOAP is
 * Adam on the numbers D_t, turned back, whatever the order of the columns, which changes here as
 * the D_t do. What should be 0 off the diagonal is rounding, some (side + 8) U of the largest
 * number for a basis and as much for each product; Adam takes it to that over eps, at most. */
TEST(soap) {
  const double sizes[][2] = {{8, 8}, {12, 7}, {6, 10}};
  for (int c = 0; c < 6; c++) {
    const int m = (int)sizes[c / 2][0], n = (int)sizes[c / 2][1], k = m < n ? m : n;
    const bool one_sided = c % 2;
    static square a, b, d, bt;
    const double b1 = 0.95, b2 = 0.95, eps = 0.5;
    double first[SIDE] = {0}, second[SIDE] = {0}, worst = 0;
    /* Rows that are not rotated must be the basis themselves. */
    if (one_sided) memset(a, 0, sizeof a);
    for (int i = 0; one_sided && i < m; i++) a[i][i] = 1;
    if (!one_sided) orthogonal(7, m, a);
    orthogonal(8, n, b);
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) bt[i][j] = b[j][i];
    job j = job_new("soap", 1, m, n);
    set(&j, "eps", eps), set(&j, "every", 2), set(&j, "one_sided", one_sided);
    for (int t = 0; t <= 9; t++) {
      memset(d, 0, sizeof d);
      /* All different, and another one is the largest after a while. */
      for (int i = 0; i < k; i++)
        d[i][i] =
            (t % 3 == 1 && i % 2 ? -1 : 1) * (1 + 0.37 * i + (t > 4 ? 3 * ((i * 3 + 1) % k) : 0));
      product(m, m, n, a, d, x_);
      product(m, n, n, x_, bt, g_);
      put(j.g[0], m, n, g_);
      increment(&j, 0.25);
      memset(x_, 0, sizeof x_);
      for (int i = 0; i < k && t > 0; i++) {
        first[i] = b1 * first[i] + (1 - b1) * d[i][i];
        second[i] = b2 * second[i] + (1 - b2) * d[i][i] * d[i][i];
        x_[i][i] = sqrt(1 - pow(b2, t)) / (1 - pow(b1, t)) * first[i] / (sqrt(second[i]) + eps);
      }
      product(m, m, n, a, x_, y_);
      product(m, n, n, y_, bt, x_);
      const double bar = 8 * (SIDE + 8) * U * norm(m, n, g_) / eps * (1 + t);
      worst = fmax(worst, off_by(j.s[0], 0.25, m, n, x_) / bar);
      CHECK(bar <= 0.1 * fmax(norm(m, n, x_), t == 0), "a bar of %g", bar);
    }
    CHECK(worst <= 1, "%dx%d one side %d: %.3g times the bar", m, n, one_sided, worst);
    printf("  soap %dx%d: worst error / bar %.3f\n", m, n, worst);
    job_free(&j);
  }
}

/* ---- K-FAC ----------------------------------------------------------------------------------- */
/* Bars as Shampoo's. */
TEST(kfac) {
  const int m = 20, n = 9;
  job j = job_new("kfac", 1, m, n);
  const double beta = 0.9, b2 = 0.95, damping = 1e-2;
  double condition = 1, worst = 0;
  static square moment, corrected;
  set(&j, "lr", 1), set(&j, "damping", damping), set(&j, "every", 2);
  memset(m_, 0, sizeof m_), memset(right, 0, sizeof right);
  for (int t = 1; t <= 5; t++) {
    draw((uint64_t)t, m, n, g_);
    put(j.g[0], m, n, g_);
    draw((uint64_t)t + 50, n, n, x_);
    for (int i = 0; i < n; i++)
      for (int k = 0; k < n; k++) {
        moment[i][k] = 0;
        for (int a = 0; a < n; a++) moment[i][k] += x_[a][i] * x_[a][k] / n;
      }
    put(j.moment, n, n, moment);
    increment(&j, 0.5);
    for (int i = 0; i < m; i++)
      for (int k = 0; k < n; k++) m_[i][k] = beta * m_[i][k] + (1 - beta) * (double)(float)g_[i][k];
    for (int i = 0; i < n; i++)
      for (int k = 0; k < n; k++)
        right[i][k] = b2 * right[i][k] + (1 - b2) * (double)(float)moment[i][k];
    if (t % 2 == 1) {
      for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) corrected[i][k] = right[i][k] / (1 - pow(b2, t));
      inverse_power(n, corrected, 0, damping, 1, root, &condition);
    }
    product(m, n, n, m_, root, y_);
    const double bar =
        (condition * (4 * t + SIDE) + 4 * SIDE) * U * norm(m, n, m_) * norm(n, n, root);
    worst = fmax(worst, off_by(j.s[0], 0.5, m, n, y_) / bar);
    CHECK(bar <= 0.1 * norm(m, n, y_), "a bar of %g", bar / norm(m, n, y_));
  }
  CHECK(worst <= 1, "%.3g times the bar", worst);
  job_free(&j);
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(shampoo);
  RUN(long_sides_have_no_factor);
  RUN(soap);
  RUN(kfac);
  return job_end();
}
