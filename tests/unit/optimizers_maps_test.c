/* Optimizers that normalise a momentum: several updates of each against its equation in plain
 * double loops. Beside each number x goes a bound e of what fp32 may have moved it by. */
#include "core/random.h"
#include "optimizer_job.h"

#include <float.h>

#define CELLS 4096
typedef struct reference {
  int64_t rows, columns, n; /* n: updates so far */
  double g[CELLS];
  double m[CELLS], m_abs[CELLS]; /* momentum, and the magnitudes that went into it */
  double x[CELLS], e[CELLS];
} reference;
static reference ref;

/* M <- keep M + share G. Two products, a sum and the rounded factors: 4 U per update. */
static void momentum(reference *r, double keep, double share) {
  r->n++;
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->m[i] = keep * r->m[i] + share * r->g[i];
    r->m_abs[i] = keep * r->m_abs[i] + share * fabs(r->g[i]);
    r->x[i] = r->m[i];
    r->e[i] = 4.0 * (double)r->n * U * r->m_abs[i];
  }
}
/* X <- G + mu M, after that. */
static void nesterov(reference *r, double mu) {
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->x[i] = r->g[i] + mu * r->m[i];
    r->e[i] = mu * r->e[i] + 4 * U * (fabs(r->g[i]) + mu * r->m_abs[i]);
  }
}
/* The sign, which is unknown where x may be on either side of 0. */
static void signs(reference *r) {
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->e[i] = fabs(r->x[i]) <= r->e[i] ? 2 : 0;
    r->x[i] = (r->x[i] > 0) - (r->x[i] < 0);
  }
}
static void scale(reference *r, double factor) {
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->x[i] *= factor;
    r->e[i] = fabs(factor) * r->e[i] + 2 * U * fabs(r->x[i]);
  }
}

/* Rows, or columns, over max(norm, floor) or norm + floor. Errors e move x / ||x|| by at most
 * (e + |x| ||e|| / ||x||) / ||x||; norm, floor and quotient round: 4 U. */
static void normalise(reference *r, bool by_column, bool add, double floor) {
  const int64_t lines = by_column ? r->columns : r->rows, n = by_column ? r->rows : r->columns;
  const int64_t line_step = by_column ? 1 : r->columns, step = by_column ? r->columns : 1;
  for (int64_t i = 0; i < lines; i++) {
    double *x = r->x + i * line_step, *e = r->e + i * line_step, square = 0, error = 0;
    for (int64_t k = 0; k < n; k++) {
      square += x[k * step] * x[k * step];
      error += e[k * step] * e[k * step];
    }
    const double length = add ? sqrt(square) + floor : fmax(sqrt(square), floor);
    const double relative = sqrt(error) / length + 4 * U;
    for (int64_t k = 0; k < n; k++) {
      x[k * step] /= length;
      e[k * step] = e[k * step] / length + fabs(x[k * step]) * relative;
    }
  }
}

/* ---- the equations, as X; S = -lr X -----------------------------------------------------------
 */
static void lion(reference *r, const double *h) {
  static double m[CELLS], m_abs[CELLS];
  memcpy(m, r->m, sizeof m), memcpy(m_abs, r->m_abs, sizeof m_abs);
  momentum(r, h[1], 1 - h[1]);
  signs(r);
  memcpy(r->m, m, sizeof m), memcpy(r->m_abs, m_abs, sizeof m_abs);
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->m[i] = h[2] * r->m[i] + (1 - h[2]) * r->g[i];
    r->m_abs[i] = h[2] * r->m_abs[i] + (1 - h[2]) * fabs(r->g[i]);
  }
}
static void signsgd(reference *r, const double *h) {
  momentum(r, h[1], 1 - h[1]);
  signs(r);
}
/* The length of a row over root is its root mean square. */
static void scale_rms(reference *r, const double *h) {
  const double root = sqrt((double)(h[3] != 0 ? r->rows : r->columns));
  momentum(r, h[1], 1 - h[1]);
  scale(r, 1 / root);
  normalise(r, h[3] != 0, false, h[2]);
  scale(r, root);
}
static void rmnp(reference *r, const double *h) {
  momentum(r, h[1], 1);
  if (h[2] != 0) nesterov(r, h[1]);
  normalise(r, false, false, h[3]);
  scale(r, sqrt(fmax(1, (double)r->rows / (double)r->columns)));
}
static void sinkgd(reference *r, const double *h) {
  memcpy(r->x, r->g, sizeof r->x);
  memset(r->e, 0, sizeof r->e);
  for (int k = 0; k < (int)h[1]; k++) {
    normalise(r, false, false, DBL_MIN);
    scale(r, sqrt((double)r->columns));
    normalise(r, true, false, DBL_MIN);
    scale(r, sqrt((double)r->rows));
  }
}
/* sign(m) |m|^(p-1) / max(||m||_p^(p-1), eps). A power of |m| +- e lies between the powers of the
 * ends; ||m||_p moves by ||e||_p at most. The rest, relative: two powers, of which the exponent's
 * rounding counts by the logarithm of the base, quotients and products. */
static void moga(reference *r, const double *h) {
  const bool by_column = h[7] != 0;
  const int64_t lines = by_column ? r->columns : r->rows, n = by_column ? r->rows : r->columns;
  const int64_t line_step = by_column ? 1 : r->columns, step = by_column ? r->columns : 1;
  const double p = by_column ? 1 / (1 - 1 / h[8]) : h[2];
  const double width = h[4] == 0   ? 1
                       : by_column ? (double)r->columns / pow((double)r->rows, 1 / h[8])
                                   : pow((double)r->columns, 1 / p);
  momentum(r, h[1], 1 - h[1]);
  for (int64_t i = 0; i < lines; i++) {
    double *x = r->x + i * line_step, *e = r->e + i * line_step, sum = 0, error = 0;
    for (int64_t k = 0; k < n * step; k += step) {
      e[k] += 2 * U * fabs(x[k]);
      sum += pow(fabs(x[k]), p);
      error += pow(e[k], p);
    }
    const double length = pow(sum, 1 / p), divisor = fmax(pow(length, p - 1), h[5]);
    const double relative =
        (p - 1) * (pow(error, 1 / p) / length + 4 * U) + (2 * p + 10 + log(CELLS)) * U;
    for (int64_t k = 0; k < n * step; k += step) {
      const double above = pow(fabs(x[k]) + e[k], p - 1) / divisor;
      const double below = fabs(x[k]) > e[k] ? pow(fabs(x[k]) - e[k], p - 1) / divisor : -above;
      const double value = pow(fabs(x[k]), p - 1) / divisor;
      x[k] = copysign(value, x[k]);
      e[k] = above - below + above * relative;
    }
  }
  scale(r, h[3] / width);
}

/* By column, whose length has eps (1 - beta^n) added. */
static void rownorm_columns(reference *r, const double *h) {
  momentum(r, h[1], 1 - h[1]);
  normalise(r, true, true, h[2] * (1 - pow(h[1], (double)r->n)));
}

/* By row, column or sign; h[3] is the map. */
static void scion(reference *r, const double *h) {
  const double m = (double)r->rows, n = (double)r->columns, divide = h[4];
  const int map = (int)h[3];
  momentum(r, 1 - h[1], h[1]);
  if (map == 1) {
    signs(r);
    scale(r, divide != 0 ? 1 / n : 1);
  } else if (map == 2) {
    scale(r, divide != 0 ? sqrt(n) : 1);
    normalise(r, false, true, h[6]);
    scale(r, divide != 0 ? 1 / sqrt(n) : 1);
  } else {
    scale(r, (divide != 0 ? n : 1) / sqrt(m));
    normalise(r, true, true, h[6]);
    scale(r, sqrt(m) / (divide != 0 ? n : 1));
  }
  scale(r, h[2]);
}
static void modula_embed(reference *r, const double *h) {
  momentum(r, h[1], 1 - h[1]);
  normalise(r, false, false, DBL_MIN);
  scale(r, sqrt((double)r->columns) * h[3]);
}

/* ---- several updates against them ------------------------------------------------------------ */
static void run_equation(const char *name, void (*equation)(reference *, const double *),
                         int64_t rows, int64_t columns, const char *hyper, double value,
                         const char *also, double choice) {
  job j = job_new(name, 1, rows, columns);
  set(&j, "lr", 1e-2);
  if (also) set(&j, also, choice);
  if (hyper) set(&j, hyper, value);
  memset(&ref, 0, sizeof ref);
  ref.rows = rows;
  ref.columns = columns;
  double worst = 0, unknown = 0;
  for (int update = 0; update < 6; update++) {
    const double lr = 1e-2 * (update + 1);
    float noise[CELLS];
    pg_normals(7, pg_hash_name(name), (uint64_t)update * CELLS, CELLS, noise);
    for (int64_t i = 0; i < rows * columns; i++)
      ref.g[i] = (double)noise[i] * (i % 7 == 0 ? 30 : 1);
    write_doubles(j.g[0], ref.g);
    increment(&j, lr);
    float *s = read_floats(j.s[0]);
    equation(&ref, j.hypers);
    for (int64_t i = 0; i < rows * columns; i++) {
      const double bar = lr * (ref.e[i] + 2 * U * fabs(ref.x[i]));
      const double off = fabs(s[i] + lr * ref.x[i]);
      CHECK(isfinite(s[i]), "%s: NaN", name);
      worst = fmax(worst, off / fmax(bar, DBL_MIN));
      unknown += ref.e[i] >= 0.1 * fmax(1, fabs(ref.x[i]));
    }
    free(s);
  }
  CHECK(worst <= 1, "%s %lldx%lld %s %g: %.3g times the bar", name, (long long)rows,
        (long long)columns, hyper ? hyper : "", value, worst);
  /* Bars that allow anything would prove nothing. */
  CHECK(unknown <= 0.01 * 6 * (double)(rows * columns), "%s: %g bars are wide", name, unknown);
  printf("  %s %lldx%lld %s %g: worst error / bar %.3f\n", name, (long long)rows,
         (long long)columns, hyper ? hyper : "", value, worst);
  if (j.o->slot_count) {
    float *slot = read_floats(j.slots[0][0]);
    for (int64_t i = 0; i < rows * columns; i++)
      CHECK(fabs(slot[i] - ref.m[i]) <= 4 * 6 * U * ref.m_abs[i], "%s slot %lld", name,
            (long long)i);
    free(slot);
  }
  job_free(&j);
}

static const int64_t shapes[][2] = {{1, 9}, {9, 1}, {5, 3}, {3, 5}, {64, 48}, {48, 64}, {1, 1}};

TEST(equations) {
  static const struct {
    const char *name;
    void (*equation)(reference *, const double *);
    const char *hyper;
    double value;
    const char *also;
    double choice;
  } cases[] = {
      {"lion", lion, NULL, 0, NULL, 0},
      {"lion", lion, "betas", 0, NULL, 0},
      {"signsgd", signsgd, NULL, 0, NULL, 0},
      {"signsgd", signsgd, "beta", 0.9, NULL, 0},
      {"scale", scale_rms, NULL, 0, NULL, 0},
      {"scale", scale_rms, "beta", 0.9, NULL, 0},
      {"scale", scale_rms, "axis", 1, NULL, 0},
      {"scale", scale_rms, "eps", 2, NULL, 0},
      {"rmnp", rmnp, NULL, 0, NULL, 0},
      {"rmnp", rmnp, "nesterov", 0, NULL, 0},
      {"rmnp", rmnp, "eps", 20, NULL, 0},
      {"sinkgd", sinkgd, NULL, 0, NULL, 0},
      {"sinkgd", sinkgd, "steps", 0, NULL, 0},
      {"sinkgd", sinkgd, "steps", 1, NULL, 0},
      {"moga", moga, NULL, 0, NULL, 0},
      {"moga", moga, "p", 1, NULL, 0},
      {"moga", moga, "p", 1.5, NULL, 0},
      {"moga", moga, "p", 3, NULL, 0},
      {"moga", moga, "fan_in", 0, NULL, 0},
      {"moga", moga, "base", 1, NULL, 0},
      {"moga", moga, "eps", 2, NULL, 0},
      {"moga", moga, NULL, 0, "axis", 1},
      {"moga", moga, "q", 1.5, "axis", 1},
      {"moga", moga, "q", 3, "axis", 1},
      {"moga", moga, "fan_in", 0, "axis", 1},
      {"rownorm", rownorm_columns, NULL, 0, "axis", 1},
      {"rownorm", rownorm_columns, "eps", 0.5, "axis", 1},
      {"scion", scion, NULL, 0, "map", 1},
      {"scion", scion, "normalised", 0, "map", 1},
      {"scion", scion, NULL, 0, "map", 2},
      {"scion", scion, "normalised", 0, "map", 2},
      {"scion", scion, "eps", 3, "map", 2},
      {"scion", scion, "alpha", 1, "map", 2},
      {"scion", scion, NULL, 0, "map", 3},
      {"scion", scion, "normalised", 0, "map", 3},
      {"scion", scion, "eps", 3, "map", 3},
      {"modula", modula_embed, NULL, 0, "map", 1},
      {"modula", modula_embed, "tau", 0.2, "map", 1},
  };
  for (size_t c = 0; c < PG_COUNT(cases); c++)
    for (size_t i = 0; i < PG_COUNT(shapes); i++)
      run_equation(cases[c].name, cases[c].equation, shapes[i][0], shapes[i][1], cases[c].hyper,
                   cases[c].value, cases[c].also, cases[c].choice);
}

/* What the maps promise, at gradients of very different sizes. */
TEST(normalised_rows) {
  const int64_t rows = 6, columns = 5;
  static const char *const names[] = {"scale", "rmnp", "moga"};
  const double lengths[] = {sqrt(5), sqrt(6.0 / 5), 20 / sqrt(5)};
  for (size_t k = 0; k < PG_COUNT(names); k++) {
    job j = job_new(names[k], 1, rows, columns);
    set(&j, "eps", 1e-30);
    double g[30];
    for (int i = 0; i < 30; i++) g[i] = (i % 7 - 3.3) * pow(10, i / 5 * 8 - 20);
    write_doubles(j.g[0], g);
    increment(&j, 1);
    float *s = read_floats(j.s[0]);
    for (int64_t i = 0; i < rows; i++) {
      double square = 0;
      for (int64_t c = 0; c < columns; c++)
        square += (double)s[i * columns + c] * s[i * columns + c];
      /* Four roundings and those of the power. */
      CHECK(fabs(sqrt(square) / lengths[k] - 1) <= 20 * U, "%s row %lld: %.9g", names[k],
            (long long)i, sqrt(square) / lengths[k]);
    }
    free(s);
    job_free(&j);
  }
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(equations);
  RUN(normalised_rows);
  return job_end();
}
