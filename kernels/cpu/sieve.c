/* Upper bounds of distances in the leading principal directions of a cloud. With orthonormal rows
 * Q [m, d], y = Q z and rho = |z - Q'y|,
 *     z_i.z_j >= y_i.y_j - rho_i rho_j,    d2_ij <= n_i + n_j - 2 (y_i.y_j - rho_i rho_j),
 * a product of m + 1 dimensions instead of d, which also leaves out pairs of a cloud whose rows
 * are all equally long. Any Q will do, but it decides how much is left.
 *
 * Rounding. y is computed in fp64 and rounded to fp32, w = (y, rho) with rho rounded up. With E =
 * Q Q' - I, |E| = e, and eta_i = |Q z_i - y_i| <= u |z_i| (and what fp64 adds),
 *     z_i.z_j = y_i.y_j + f_i.f_j + t,    f = z - Q'y,
 *     |t| <= |y_i| (eta_j + 2e |y_j|) + |y_j| (eta_i + e |y_i|) <= (2u + 3e) r_i r_j (1 + 2u),
 *     |f|^2 <= n - |Q z|^2 + eta^2 + e |y|^2 (1 + e),
 * of which the last line is what rho is. So 2 |t| <= (4u + 6e) r_i r_j <= 2u (r_i + r_j)^2 as
 * e < 2^-36 is checked; with the error 2g |w_i||w_j| of the fp32 product, the 3u (r_i + r_j)^2 of
 * three operations and the 2u (r_i + r_j)^2 of rounding z, that is within the slack of cloud.h,
 * and the same comparison holds: what misses L^2 - slack misses the diameter.
 *
 * How much it leaves is measured on a sample of panels before all rows are projected, and weighed
 * against what it costs. */
#include "cloud.h"
#include <cblas.h>

#define SAMPLE 4096   /* rows from which directions are found, at most */
#define TESTED 48     /* panels of it whose pairs are tried, at most */
#define ITERATIONS 2  /* of the subspace iteration */
#define TRIAL 0.004   /* what finding directions may cost, of all pairs that norms leave */
#define WORTH 0.8     /* of the cost of all pairs, at most this with the sieve */
#define LOOSE 0x1p-36 /* e, at most */
#define ROUGH 1.5     /* a multiply-add in few dimensions, keys included, relative to many */
#define DOUBLE 4.0    /* one of the projection, in fp64, likewise */

typedef struct plan {
  const pg_cloud *c;
  double bound, floor;
  int64_t panels;                /* whose rows can have a partner */
  int64_t count;                 /* sampled ones: number a is a * panels / count */
  int64_t size[PG_SIEVE_LEVELS]; /* directions of a level, the first ones of the others */
  int64_t most;                  /* of the last level */
  double *basis;                 /* [most, d], orthonormal rows, or 0 where the cloud has no more */
  double loose;                  /* e */
} plan;

/* Multiply-adds of the pairs of panels that norms leave. */
static double left_by_norms(const pg_cloud *c, double bound) {
  double blocks = 0;
  int64_t j = c->panels;
  for (int64_t i = 0; i < c->panels; i++) {
    while (j > i && c->r[i * PG_PANEL] + c->r[(j - 1) * PG_PANEL] < bound) j--;
    if (j <= i) break;
    blocks += (double)(j - i);
  }
  return blocks * PG_BLOCK * (double)c->d;
}

/* Rows of y [most, d] made orthonormal, twice for the rounding of the first time; 0 where nothing
 * but rounding is left. */
static void orthonormalize(double *y, int64_t most, int64_t d) {
  for (int64_t i = 0; i < most; i++) {
    double *row = y + i * d, before = cblas_dnrm2((int)d, row, 1);
    for (int pass = 0; pass < 2; pass++)
      for (int64_t o = 0; o < i; o++)
        cblas_daxpy((int)d, -cblas_ddot((int)d, y + o * d, 1, row, 1), y + o * d, 1, row, 1);
    const double after = cblas_dnrm2((int)d, row, 1);
    cblas_dscal((int)d, after > 1e-6 * before ? 1 / after : 0, row, 1);
  }
}

/* |Q Q' - I|_F but for rows that are 0. */
static double looseness(const double *y, int64_t most, int64_t d) {
  double sum = 0;
  for (int64_t i = 0; i < most; i++)
    for (int64_t o = 0; o <= i; o++) {
      const double dot = cblas_ddot((int)d, y + i * d, 1, y + o * d, 1);
      const double off = i == o && dot != 0 ? dot - 1 : dot;
      sum += (i == o ? 1 : 2) * off * off;
    }
  return sqrt(sum) + (double)most * (double)d * 0x1p-52;
}

/* Subspace iteration on the sample, from random signs. Products are cut in the same way whatever
 * the number of threads. 0, or -1 without memory. */
static int find_directions(pg_queue *q, plan *p, double *work) {
  const int64_t d = p->c->d, most = p->most, rows = p->count * PG_PANEL;
  float *x = malloc((size_t)(rows * d) * sizeof *x), *y = malloc((size_t)(most * d) * sizeof *y);
  float *b = malloc((size_t)(rows * most) * sizeof *b);
  uint32_t state = 1;
  int status = -1;
  if (!x || !y || !b) goto fail;
#pragma omp parallel for num_threads(q->threads)
  for (int64_t a = 0; a < p->count; a++) {
    const float *panel = p->c->z + a * p->panels / p->count * d * PG_PANEL;
    for (int64_t k = 0; k < d; k++)
      for (int64_t l = 0; l < PG_PANEL; l++)
        x[(a * PG_PANEL + l) * d + k] = panel[k * PG_PANEL + l];
  }
  for (int64_t e = 0; e < most * d; e++) {
    state = state * 1664525u + 1013904223u;
    y[e] = state >> 31 ? 1 : -1;
  }
  for (int iteration = 0; iteration < ITERATIONS; iteration++) {
#pragma omp parallel num_threads(q->threads)
    {
      pg_blas_on_this_thread();
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows; i += 8 * PG_PANEL)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)pg_min64(8 * PG_PANEL, rows - i),
                    (int)most, (int)d, 1, x + i * d, (int)d, y, (int)d, 0, b + i * most, (int)most);
#pragma omp for schedule(static)
      for (int64_t j = 0; j < d; j += 64)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)most, (int)pg_min64(64, d - j),
                    (int)rows, 1, b, (int)most, x + j, (int)d, 0, y + j, (int)d);
#pragma omp single
      {
        for (int64_t e = 0; e < most * d; e++) p->basis[e] = y[e];
        orthonormalize(p->basis, most, d);
        for (int64_t e = 0; e < most * d; e++) y[e] = (float)p->basis[e];
      }
    }
    *work += 2 * (double)rows * (double)(most * d) + 2 * (double)(most * most * d);
  }
  p->loose = looseness(p->basis, most, d);
  *work += (double)(most * most * d) / 2;
  status = 0;
fail:
  free(x), free(y), free(b);
  return status;
}

/* w of every level for one panel of z. */
static void project(const plan *p, int levels, int64_t panel, float *const *w) {
  const pg_cloud *c = p->c;
  const int64_t d = c->d;
  const float *z = c->z + panel * d * PG_PANEL;
  double rest[PG_PANEL], exact[PG_PANEL], n[PG_PANEL];
  for (int l = 0; l < PG_PANEL; l++) {
    const double r = c->r[panel * PG_PANEL + l];
    n[l] = r * r;
    rest[l] = n[l];
  }
  int level = 0;
  for (int64_t j = 0; j < p->size[levels - 1]; j += 2) {
    double sum[2][PG_PANEL] = {{0}};
    const int64_t pair = pg_min64(2, p->size[levels - 1] - j);
    const double *one = p->basis + j * d, *two = p->basis + (j + pair - 1) * d;
    for (int64_t k = 0; k < d; k++) {
#pragma omp simd
      for (int l = 0; l < PG_PANEL; l++) {
        sum[0][l] += one[k] * (double)z[k * PG_PANEL + l];
        sum[1][l] += two[k] * (double)z[k * PG_PANEL + l];
      }
    }
    for (int64_t o = 0; o < pair; o++) {
      for (int l = 0; l < PG_PANEL; l++) {
        const float y = (float)sum[o][l];
        const double eta = (double)y - sum[o][l];
        for (int m = level; m < levels; m++) w[m][(j + o) * PG_PANEL + l] = y;
        exact[l] = sum[o][l] * sum[o][l];
        rest[l] += eta * eta - exact[l];
      }
      if (j + o + 1 < p->size[level]) continue;
      for (int l = 0; l < PG_PANEL; l++) {
        const double dust = n[l] * (8 * ((double)d + 64) * 0x1p-52 + 4 * p->loose);
        const float rho = (float)sqrt(fmax(rest[l], 0) + dust);
        w[level][p->size[level] * PG_PANEL + l] = nextafterf(rho, INFINITY);
      }
      level++;
    }
  }
}

/* The shares of the sample's blocks that each level leaves, and of the last one's those with many
 * pairs, all of those that norms leave; false without memory. */
static bool try_levels(pg_queue *q, const plan *p, int levels, int64_t tested, double *share,
                       double *work) {
  const pg_cloud *c = p->c;
  int64_t seen = 0, passed[PG_SIEVE_LEVELS] = {0};
  float *w[PG_SIEVE_LEVELS] = {NULL};
  bool ok = true;
  for (int l = 0; l < levels; l++) {
    w[l] = malloc((size_t)(tested * (p->size[l] + 1) * PG_PANEL) * sizeof **w);
    ok = ok && w[l];
  }
#pragma omp parallel for num_threads(q->threads) if (ok)
  for (int64_t a = 0; a < (ok ? tested : 0); a++) {
    float *at[PG_SIEVE_LEVELS];
    for (int l = 0; l < levels; l++) at[l] = w[l] + a * (p->size[l] + 1) * PG_PANEL;
    project(p, levels, a * p->panels / tested, at);
  }
#pragma omp parallel for num_threads(q->threads) schedule(dynamic) reduction(+ : seen, passed)
  for (int64_t a = 0; a < (ok ? tested : 0); a++) {
    float left[(PG_SIEVE_MOST + 1) * PG_PANEL], key[PG_BLOCK];
    for (int64_t b = a; b < tested; b++) {
      const int64_t i = a * p->panels / tested, j = b * p->panels / tested;
      const double ri = c->r[i * PG_PANEL], rj = c->r[j * PG_PANEL];
      if (ri + rj < p->bound) break;
      seen++;
      for (int l = 0; l < levels; l++) {
        const int64_t size = (p->size[l] + 1) * PG_PANEL;
        memcpy(left, w[l] + a * size, (size_t)size * sizeof *left);
        for (int64_t e = size - PG_PANEL; e < size; e++) left[e] = -left[e];
        pg_panel_products(left, w[l] + b * size, p->size[l] + 1, key);
        if (!((double)pg_panel_keys(c, i, j, 1, key) >= p->floor - pg_cloud_slack(c->d, ri, rj)))
          break;
        passed[l]++;
      }
    }
  }
  for (int l = 0; l < levels; l++) {
    free(w[l]);
    share[l] = (double)passed[l] / fmax((double)seen, 1);
    *work += (double)(tested * PG_PANEL * p->size[l] * c->d) * (l == levels - 1) +
             (l ? share[l - 1] : 1) * (double)seen * PG_BLOCK * (double)(p->size[l] + 1);
  }
  return ok;
}

/* w of all panels. */
static int project_all(pg_queue *q, const plan *p, pg_sieve *s, double *work) {
  for (int l = 0; l < s->levels; l++) {
    s->steps[l] = p->size[l] + 1;
    s->w[l] = aligned_alloc(64, (size_t)(p->panels * s->steps[l] * PG_PANEL) * sizeof **s->w);
    if (!s->w[l]) return -1;
  }
#pragma omp parallel for num_threads(q->threads) schedule(dynamic)
  for (int64_t i = 0; i < p->panels; i++) {
    float *at[PG_SIEVE_LEVELS];
    for (int l = 0; l < s->levels; l++) at[l] = s->w[l] + i * s->steps[l] * PG_PANEL;
    project(p, s->levels, i, at);
  }
  s->panels = p->panels;
  *work += (double)p->panels * PG_PANEL * (double)(p->size[s->levels - 1] * p->c->d);
  return 0;
}

void PG_CPU(sieve_new)(pg_queue *q, const pg_cloud *c, const pg_pair *best, pg_sieve *s,
                       double *work) {
  plan p = {.c = c,
            .bound = pg_cloud_reach(c, best->square),
            .floor = best->square * c->scale * c->scale};
  const double left = left_by_norms(c, p.bound), d = (double)c->d, allowed = TRIAL * left;
  *s = (pg_sieve){0};
  while (p.panels < c->panels && c->r[0] + c->r[p.panels * PG_PANEL] >= p.bound) p.panels++;
  p.size[0] = pg_min64(16, c->d / 16);
  p.size[1] = 6 * p.size[0];
  if (best->square <= 0 || p.size[0] < 1 || c->rows < PG_SIEVE_ROWS) return;

  /* As many directions and rows as the trial may cost: 2 products an iteration, 1 projection. */
  int levels = PG_SIEVE_LEVELS;
  double rows = 0;
  for (; levels; levels--) {
    const double each = (double)p.size[levels - 1] * d;
    rows = 0.8 * (allowed - (2 * ITERATIONS + 0.5) * (double)p.size[levels - 1] * each) /
           (each * (2 * ITERATIONS + 0.25));
    if (rows >= fmax(4 * (double)p.size[levels - 1], 2 * PG_PANEL)) break;
  }
  if (!levels) return;
  p.count = pg_min64((int64_t)(fmin(rows, SAMPLE) / PG_PANEL), p.panels);
  if (p.count < 2) return;
  p.most = p.size[levels - 1];
  p.basis = malloc((size_t)(p.most * c->d) * sizeof *p.basis);
  pg_note_held(q, (size_t)PG_CPU(diameter_bytes)(c->rows, c->d));
  const double block = PG_BLOCK * (double)(p.size[0] + p.most + 2);
  const int64_t tested = pg_max64(
      2, pg_min64(pg_min64(TESTED, p.count / 4 + 1), (int64_t)sqrt(0.3 * allowed / block)));
  double share[PG_SIEVE_LEVELS];
  if (!p.basis || find_directions(q, &p, work) < 0 || !(p.loose < LOOSE) ||
      !try_levels(q, &p, levels, tested, share, work))
    goto done;

  /* Relative to all pairs: the levels, projecting, and what they leave. */
  double cheapest = WORTH, through = 1, cost = 0;
  for (int l = 0; l < levels; l++) {
    cost += through * ROUGH * (double)(p.size[l] + 1) / d;
    through = share[l];
    const double projecting =
        DOUBLE * (double)p.panels * PG_PANEL * (double)p.size[l] * d / fmax(left, 1);
    if (cost + projecting + through >= cheapest) continue;
    cheapest = cost + projecting + through;
    s->levels = l + 1;
  }
  if (s->levels && project_all(q, &p, s, work) < 0) PG_CPU(sieve_free)(s);
done:
  free(p.basis);
}

void PG_CPU(sieve_free)(pg_sieve *s) {
  for (int l = 0; l < PG_SIEVE_LEVELS; l++) free(s->w[l]);
  *s = (pg_sieve){0};
}

/* Panels of both levels, and while directions are sought the sample, its products, and bases. */
int64_t PG_CPU(sieve_bytes)(int64_t rows, int64_t columns) {
  const int64_t few = pg_min64(16, columns / 16), most = 6 * few;
  const int64_t whole = rows + PG_PANEL - 1, sample = pg_min64(SAMPLE, whole);
  if (few < 1 || rows < PG_SIEVE_ROWS) return 0;
  return 8 * most * columns +
         4 * pg_max64(whole * (few + most + 2), sample * (columns + most) + most * columns);
}
