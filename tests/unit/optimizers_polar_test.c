/* Optimizers that orthogonalise, with every option: several updates of each against its equation
 * in plain double loops. Bars are in Frobenius norm, one for the matrix: the normalised X is off by
 * some roundings per update, each product by U sqrt(n) at most, and a step multiplies what it gets
 * by its first coefficient at most. */
#include "core/random.h"
#include "optimizer_job.h"

#include <float.h>

#define CELLS 2500
typedef struct reference {
  int64_t rows, columns, n;
  double g[CELLS], m[CELLS], d[CELLS]; /* gradient, momentum, direction */
  double m_abs[CELLS];                 /* the magnitudes that went into m */
  double start;                        /* by how much of its norm D may be off */
  double x[CELLS], bar;                /* polar factor, and by how much X may be off */
  double v[CELLS], v_bar;              /* NorMuon's rows */
} reference;
static reference ref;

static const double quintic[][3] = {{3.4445, -4.7750, 2.0315}};
static const double polar_express[][3] = {
    {8.156554524902461, -22.48329292557795, 15.878769915207462},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
static const double dion[][3] = {{4.0848, -6.8946, 2.9270},
                                 {3.9505, -6.3029, 2.6377},
                                 {3.7418, -5.5913, 2.3037},
                                 {2.8769, -3.1427, 1.2046},
                                 {2.8366, -3.0525, 1.2012}};
static const double modula[][3] = {
    {3.8623046875, -8.111328125, 4.890625},      {3.6474609375, -6.5244140625, 3.3818359375},
    {3.7099609375, -6.3466796875, 3.1357421875}, {3.9248046875, -6.2353515625, 2.837890625},
    {2.6142578125, -2.9580078125, 1.134765625},  {2.12109375, -1.7900390625, 0.666015625}};
/* Over 1.05, its third and its fifth power, all but the last. */
static const double gram[][3] = {{7.8925828744244084, -20.383013945879568, 13.555306149406924},
                                 {3.9114848681354308, -2.5464635929060884, 0.42689883196730738},
                                 {3.7606579556974231, -2.5128190182165628, 0.43236473490700728},
                                 {3.1603996736862872, -2.1496495188984981, 0.39963669076643887},
                                 {2.1910971618617303, -1.4416620102146629, 0.32814648762315501},
                                 {1.801239435987998, -1.0953424703117043, 0.29523586374401473},
                                 {1.7857156960509026, -1.0797984195226853, 0.29382244135288499},
                                 {1.875, -1.25, .375}};
static const struct {
  const double (*step)[3];
  int count;
  double room;
} sets[] = {{quintic, 1, 1}, {polar_express, 5, 1.02}, {dion, 5, 1}, {modula, 6, 1}, {gram, 8, 1}};

/* M <- keep M + share G; D = share G + keep M or M. */
static void direction(reference *r, double keep, double share, bool nesterov) {
  r->n++;
  for (int64_t i = 0; i < r->rows * r->columns; i++) {
    r->m[i] = keep * r->m[i] + share * r->g[i];
    r->m_abs[i] = keep * r->m_abs[i] + share * fabs(r->g[i]);
    r->d[i] = nesterov ? share * r->g[i] + keep * r->m[i] : r->m[i];
  }
  r->start = 4.0 * (double)r->n * U;
}

/* As published: the shorter side first, X X^T. */
static void polar(reference *r, int set, int steps, double eps) {
  static double x[CELLS], a[CELLS], p[CELLS], y[CELLS];
  const int64_t rows = r->rows, columns = r->columns, cells = rows * columns;
  const bool tall = rows > columns;
  const int64_t m = tall ? columns : rows, n = tall ? rows : columns;
  double norm = 0;
  for (int64_t i = 0; i < cells; i++) norm += r->d[i] * r->d[i];
  norm = sqrt(norm) * sets[set].room + eps;
  for (int64_t i = 0; i < cells; i++)
    x[tall ? i % columns * rows + i / columns : i] = norm > 0 ? r->d[i] / norm : 0;
  r->bar = r->start + 6 * U;
  for (int k = 0; k < steps; k++) {
    const double *f = sets[set].step[k < sets[set].count ? k : sets[set].count - 1];
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        a[i * m + j] = 0;
        for (int64_t l = 0; l < n; l++) a[i * m + j] += x[i * n + l] * x[j * n + l];
      }
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        double square = 0;
        for (int64_t l = 0; l < m; l++) square += a[i * m + l] * a[l * m + j];
        p[i * m + j] = f[1] * a[i * m + j] + f[2] * square;
      }
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        y[i * n + j] = f[0] * x[i * n + j];
        for (int64_t l = 0; l < m; l++) y[i * n + j] += p[i * m + l] * x[l * n + j];
      }
    memcpy(x, y, sizeof x);
    r->bar = f[0] * r->bar + 2 * f[0] * U * sqrt((double)m);
  }
  for (int64_t i = 0; i < cells; i++) r->x[i] = x[tall ? i % columns * rows + i / columns : i];
}

static double frobenius(const double *x, int64_t n) {
  double square = 0;
  for (int64_t i = 0; i < n; i++) square += x[i] * x[i];
  return sqrt(square);
}
static void scale(reference *r, double factor) {
  const int64_t n = r->rows * r->columns;
  r->bar = fabs(factor) * (r->bar + 4 * U * frobenius(r->x, n));
  for (int64_t i = 0; i < n; i++) r->x[i] *= factor;
}

/* ---- the equations ----------------------------------------------------------------------------
 */
static void muon_block(reference *r, const double *h) {
  const double rows = (double)r->rows, columns = (double)r->columns;
  const int64_t n = r->rows * r->columns;
  polar(r, (int)h[8], (int)h[3], h[4]);
  if (h[9] == 0) scale(r, sqrt(fmax(1, rows / columns)));
  if (h[9] == 1) scale(r, sqrt(rows / columns));
  if (h[9] == 2) scale(r, 0.2 * sqrt(fmax(rows, columns)));
  if (h[9] == 3) {
    /* <D, X> moves by ||D|| bar, and by what D itself is off by; X moves as before. */
    const double d = frobenius(r->d, n), x = frobenius(r->x, n), off = r->bar;
    double nuclear = 0;
    for (int64_t i = 0; i < n; i++) nuclear += r->d[i] * r->x[i];
    scale(r, nuclear);
    r->bar += x * d * (off + (4.0 * (double)r->n + 6) * U * x) + off * off * d;
  }
}
/* Blocks of rows or columns by themselves; errors of different blocks add up in squares. */
static void muon(reference *r, const double *h) {
  static reference block;
  const int64_t heads = (int64_t)h[10], rows = h[11] == 0 ? r->rows / heads : r->rows;
  const int64_t columns = h[11] == 0 ? r->columns : r->columns / heads;
  double square = 0;
  direction(r, h[1], h[7] != 0 ? 1 - h[1] : 1, h[2] != 0);
  if (heads == 1) {
    muon_block(r, h);
    return;
  }
  for (int64_t k = 0; k < heads; k++) {
    const int64_t at = k * (h[11] == 0 ? rows * columns : columns);
    block.rows = rows, block.columns = columns, block.n = r->n, block.start = r->start;
    for (int64_t i = 0; i < rows * columns; i++)
      block.d[i] = r->d[at + i / columns * r->columns + i % columns];
    muon_block(&block, h);
    for (int64_t i = 0; i < rows * columns; i++)
      r->x[at + i / columns * r->columns + i % columns] = block.x[i];
    square += block.bar * block.bar;
  }
  r->bar = sqrt(square);
}
static void scion(reference *r, const double *h) {
  const double rows = (double)r->rows, columns = (double)r->columns;
  direction(r, 1 - h[1], h[1], false);
  polar(r, 0, (int)h[5], 1e-7);
  scale(r, h[2] * sqrt(h[4] != 0 ? rows / columns : rows));
}
static void modula_linear(reference *r, const double *h) {
  direction(r, h[1], 1 - h[1], false);
  polar(r, 3, (int)h[4], 0);
  scale(r, h[3] * sqrt((double)r->rows / (double)r->columns));
}
/* With X off by `bar`, so is each row, and a root mean square by bar / sqrt(columns); the root of
 * a mean of their squares by no more than the largest of these. Y = X / sqrt(v) then moves by
 * bar / sqrt(v_i) + ||x_i|| / v_i * bar / sqrt(columns) in row i, and Y / ||Y|| by twice that
 * over ||Y||. */
static void normuon(reference *r, const double *h) {
  const int64_t rows = r->rows, columns = r->columns;
  double moved = 0;
  direction(r, h[1], 1 - h[1], true);
  polar(r, 0, (int)h[3], h[4]);
  const double before = frobenius(r->x, rows * columns), off = r->bar + 4 * U * before;
  r->v_bar = fmax(r->v_bar, off / sqrt((double)columns));
  for (int64_t i = 0; i < rows; i++) {
    double *x = r->x + i * columns, length = frobenius(x, columns);
    r->v[i] = h[2] * r->v[i] + (1 - h[2]) * length * length / (double)columns;
    const double root = sqrt(r->v[i]) + 1e-10;
    const double e = off / root + length / root / root * (r->v_bar + 4 * (double)r->n * U * root);
    moved += e * e;
    for (int64_t j = 0; j < columns; j++) x[j] /= root;
  }
  const double after = frobenius(r->x, rows * columns);
  for (int64_t i = 0; i < rows * columns; i++) r->x[i] *= before / (after + 1e-10);
  r->bar = off + 2 * before * sqrt(moved) / after;
  scale(r, sqrt(fmax(1, (double)rows / (double)columns)));
}

/* P takes errors in x to no larger ones, and rounds twice. */
static void center(double *x, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j++) {
    double mean = 0;
    for (int64_t i = 0; i < rows; i++) mean += x[i * columns + j] / (double)rows;
    for (int64_t i = 0; i < rows; i++) x[i * columns + j] -= mean;
  }
}
static void lausu(reference *r, const double *h) {
  static double e[CELLS];
  const int64_t rows = r->rows, columns = r->columns, n = rows * columns;
  const int map = (int)h[2];
  const bool centered = h[3] != 0;
  direction(r, h[1], 1 - h[1], false);
  /* Of a row: its own errors, those of the mean row, and two roundings. */
  const double all = 4.0 * (double)r->n * U * frobenius(r->m_abs, n);
  double off = 0;
  for (int64_t i = 0; i < rows; i++) {
    e[i] = 4.0 * (double)r->n * U * frobenius(r->m_abs + i * columns, columns);
    if (centered) e[i] += all / sqrt((double)rows) + 2 * U * frobenius(r->d + i * columns, columns);
  }
  if (centered) center(r->d, rows, columns);
  for (int64_t i = 0; i < rows; i++) {
    double *d = r->d + i * columns, length = frobenius(d, columns);
    if (map != 1) {
      /* d / (||d|| + eps) moves by 2 e over that at most, and rounds. */
      e[i] = 2 * e[i] / (length + h[6]) + 4 * U;
      for (int64_t j = 0; j < columns; j++) d[j] /= length + h[6];
    }
    off += e[i] * e[i];
  }
  off = sqrt(off);
  if (map == 2 && centered) {
    off += 2 * U * frobenius(r->d, n);
    center(r->d, rows, columns);
  }
  if (map == 0) {
    memcpy(r->x, r->d, sizeof r->x);
    r->bar = off;
  } else {
    const double length = frobenius(r->d, n), alpha = h[4];
    double nuclear = 0;
    r->start = off / length;
    polar(r, 4, (int)h[5], h[6]);
    for (int64_t i = 0; i < n; i++) nuclear += r->d[i] * r->x[i];
    /* nu, relative; nu^alpha moves by alpha times that, and X as before. */
    const double x = frobenius(r->x, n);
    const double relative = (length * r->bar + off * (x + r->bar) + U * length * x) / nuclear;
    scale(r, pow(fmax(nuclear, h[6]), alpha));
    r->bar += (alpha * relative + 4 * U) * (frobenius(r->x, n) + r->bar);
  }
  if (centered) {
    r->bar += 2 * U * frobenius(r->x, n);
    center(r->x, rows, columns);
  }
}

/* ---- several updates against them ------------------------------------------------------------ */
typedef struct setting {
  const char *name;
  void (*equation)(reference *, const double *);
  struct {
    const char *name;
    double value;
  } hypers[4];
} setting;

/* The widest bar, over ||X||, that still tells a wrong equation from the right one: half of what it
 * moves X by. Without a factor of the shape, or with another one, that is 1 - sqrt(short/long side)
 * of X at least. Where the sides are equal there is none, and coefficients of another set move X:
 * five quintic steps take 1 to 0.696, those of the other sets to 0.90 or more. */
static double told_apart(int64_t rows, int64_t columns) {
  const double ratio = (double)(rows < columns ? rows : columns) / (double)fmax(rows, columns);
  return (1 - (rows == columns ? 0.696 / 0.90 : sqrt(ratio))) / 2;
}

static void run_equation(const setting *s, int64_t rows, int64_t columns) {
  const int64_t n = rows * columns;
  job j = job_new(s->name, 1, rows, columns);
  set(&j, "lr", 1e-2);
  for (size_t k = 0; k < 4 && s->hypers[k].name; k++)
    set(&j, s->hypers[k].name, s->hypers[k].value);
  memset(&ref, 0, sizeof ref);
  ref.rows = rows;
  ref.columns = columns;
  double worst = 0, widest = 0;
  for (int update = 0; update < 4; update++) {
    const double lr = 1e-2 * (update + 1);
    float noise[CELLS];
    double error = 0;
    pg_normals(7, pg_hash_name(s->name), (uint64_t)update * CELLS, CELLS, noise);
    for (int64_t i = 0; i < n; i++) ref.g[i] = (double)noise[i] * (i % 7 == 0 ? 30 : 1);
    write_doubles(j.g[0], ref.g);
    increment(&j, lr);
    s->equation(&ref, j.hypers);
    float *got = read_floats(j.s[0]);
    for (int64_t i = 0; i < n; i++) {
      const double e = got[i] + lr * ref.x[i];
      CHECK(isfinite(got[i]), "%s: NaN", s->name);
      error += e * e;
    }
    worst = fmax(worst, sqrt(error) / (lr * ref.bar));
    widest = fmax(widest, ref.bar / frobenius(ref.x, n));
    free(got);
  }
  CHECK(worst <= 1, "%s %lldx%lld: %.3g times the bar", s->name, (long long)rows,
        (long long)columns, worst);
  CHECK(widest <= told_apart(rows, columns), "%s: a bar of %g", s->name, widest);
  /* Two products, a sum and the rounded factors per update. */
  float *m = read_floats(j.slots[0][0]);
  for (int64_t i = 0; i < n; i++)
    CHECK(fabs(m[i] - ref.m[i]) <= 4 * 4 * U * ref.m_abs[i], "%s slot %lld", s->name, (long long)i);
  free(m);
  if (j.o->slot_count > 1) {
    float *v = read_floats(j.slots[0][1]);
    for (int64_t i = 0; i < rows; i++)
      CHECK(fabs(sqrt(v[i]) - sqrt(ref.v[i])) <= ref.v_bar + 4 * 4 * U * sqrt(ref.v[i]),
            "%s v %lld", s->name, (long long)i);
    free(v);
  }
  printf("  %s %lldx%lld: worst error / bar %.3f, widest bar %.2g\n", s->name, (long long)rows,
         (long long)columns, worst, widest);
  job_free(&j);
}

TEST(heads) {
  static const struct {
    int64_t rows, columns;
    setting setting;
  } cases[] = {
      {48, 32, {"muon", muon, {{"heads", 4}}}},
      {12, 40, {"muon", muon, {{"heads", 3}, {"average", 1}}}},
      {6, 5, {"muon", muon, {{"heads", 6}, {"nesterov", 0}}}},
      {32, 48, {"muon", muon, {{"heads", 4}, {"split", 1}}}},
      {40, 12, {"muon", muon, {{"heads", 3}, {"split", 1}, {"scale", 1}}}},
      {40, 12, {"muon", muon, {{"heads", 2}, {"split", 1}, {"scale", 3}, {"average", 1}}}},
      {12, 8, {"muon", muon, {{"heads", 2}, {"scale", 3}, {"coefficients", 2}}}},
  };
  for (size_t c = 0; c < PG_COUNT(cases); c++)
    run_equation(&cases[c].setting, cases[c].rows, cases[c].columns);
}

/* In bf16 each block has the bits that it has as a matrix. */
TEST(heads_in_bf16) {
  for (int split = 0; split < 2; split++) {
    job all = job_new("muon", 1, 12, 20), one = job_new("muon", 1, split ? 12 : 6, split ? 10 : 20);
    float g[240], part[120];
    set(&all, "precision", 1), set(&one, "precision", 1);
    set(&all, "heads", 2), set(&all, "split", split);
    pg_normals(3, 1, 0, 240, g);
    CHECK(pg_tensor_write(all.g[0], g) == 0, "write");
    increment(&all, 0.5);
    float *s = read_floats(all.s[0]);
    for (int k = 0; k < 2; k++) {
      const int at = k * (split ? 10 : 120), width = split ? 10 : 20;
      for (int i = 0; i < 120; i++) part[i] = g[at + i / width * 20 + i % width];
      CHECK(pg_tensor_write(one.g[0], part) == 0, "write");
      const float zero[120] = {0};
      CHECK(pg_tensor_write(one.slots[0][0], zero) == 0, "write");
      increment(&one, 0.5);
      float *want = read_floats(one.s[0]);
      for (int i = 0; i < 120; i++)
        CHECK(s[at + i / width * 20 + i % width] == want[i], "split %d, block %d, %d", split, k, i);
      free(want);
    }
    free(s);
    job_free(&all), job_free(&one);
  }
}

TEST(equations) {
  static const int64_t shapes[][2] = {{1, 9}, {9, 1}, {5, 3}, {3, 5}, {50, 40}, {32, 48}, {1, 1}};
  static const setting cases[] = {
      {"muon", muon, {{"average", 1}}},
      {"muon", muon, {{"average", 1}, {"nesterov", 0}}},
      {"muon", muon, {{"coefficients", 1}}},
      {"muon", muon, {{"coefficients", 1}, {"steps", 7}}},
      {"muon", muon, {{"coefficients", 2}, {"average", 1}}},
      {"muon", muon, {{"scale", 1}}},
      {"muon", muon, {{"scale", 2}}},
      {"muon", muon, {{"scale", 3}}},
      {"muon", muon, {{"scale", 3}, {"average", 1}}},
      {"muon", muon, {{"scale", 3}, {"nesterov", 0}, {"steps", 4}}},
      {"scion", scion, {{0}}},
      {"scion", scion, {{"normalised", 0}, {"alpha", 1}}},
      {"modula", modula_linear, {{0}}},
      {"modula", modula_linear, {{"steps", 7}, {"tau", 0.3}}},
      {"normuon", normuon, {{0}}},
      {"normuon", normuon, {{"beta2", 0.5}, {"momentum", 0}}},
      {"lausu", lausu, {{0}}},
      {"lausu", lausu, {{"center", 1}}},
      {"lausu", lausu, {{"map", 1}}},
      {"lausu", lausu, {{"map", 1}, {"alpha", 0}}},
      {"lausu", lausu, {{"center", 1}, {"map", 1}, {"alpha", 0.5}, {"steps", 4}}},
      {"lausu", lausu, {{"map", 2}, {"beta", 0}}},
      {"lausu", lausu, {{"center", 1}, {"map", 2}, {"steps", 4}}},
  };
  for (size_t c = 0; c < PG_COUNT(cases); c++)
    for (size_t i = 0; i < PG_COUNT(shapes); i++)
      /* One row has no part outside the mean: rounding alone would be normalised. */
      if (strcmp(cases[c].hypers[0].name ? cases[c].hypers[0].name : "", "center") != 0 ||
          shapes[i][0] > 1)
        run_equation(&cases[c], shapes[i][0], shapes[i][1]);
}

/* The nuclear norm needs X in fp32. */
TEST(nuclear_in_bf16_is_refused) {
  job j = job_new("muon", 1, 4, 3);
  set(&j, "scale", 3);
  set(&j, "precision", 1);
  const float *g[1] = {j.g[0]->data};
  float *s[1] = {j.s[0]->data};
  void *memory[1] = {j.slots[0][0]->data};
  void *const *slots[1] = {memory};
  pg_increment_group group = {.context = ctx,
                              .count = 1,
                              .rows = 4,
                              .all_rows = 4,
                              .columns = 3,
                              .gradients = g,
                              .slots = slots,
                              .increments = s,
                              .updates = j.updates,
                              .hypers = j.hypers,
                              .lr = 1};
  CHECK(j.o->increment(&group, NULL) == PG_EINVAL, "refused");
  CHECK(strstr(pg_context_message(ctx), "needs precision = \"fp32\""), "%s",
        pg_context_message(ctx));
  job_free(&j);
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(equations);
  RUN(heads);
  RUN(heads_in_bf16);
  RUN(nuclear_in_bf16_is_refused);
  return job_end();
}
