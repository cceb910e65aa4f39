/* The rank of a panel's log-probabilities, without the matrix: QR decompositions of its two thin
 * factors, and the singular values of what remains. */
#include "logits.h"
#include "logits_internal.h"
#include "model_internal.h"
#include "panel.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* LAPACK, Fortran's calling convention: a QR decomposition, and singular values alone. */
extern void dgeqrf_(const int *m, const int *n, double *a, const int *lda, double *tau,
                    double *work, const int *lwork, int *info);
extern void dgesdd_(const char *job, const int *m, const int *n, double *a, const int *lda,
                    double *s, double *u, const int *ldu, double *vt, const int *ldvt, double *work,
                    const int *lwork, int *iwork, int *info);

static int lapack(pg_context *ctx, const char *what, int info) {
  return info == 0 ? 0 : pg_fail(ctx, PG_ENONFINITE, "LAPACK's %s gave up: info = %d", what, info);
}

/* The triangle R [min(m, n), n] of a [m, n], both by columns; a is used up, r zeroed below. */
static int triangle(pg_context *ctx, int m, int n, double *a, double *r) {
  const int k = m < n ? m : n, query = -1;
  double *tau = malloc((size_t)k * sizeof *tau), *work = NULL, size;
  int info, lwork, status = 0;
  dgeqrf_(&m, &n, a, &m, tau, &size, &query, &info);
  lwork = (int)size;
  work = malloc((size_t)lwork * sizeof *work);
  if (!tau || !work) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a QR decomposition"));
  dgeqrf_(&m, &n, a, &m, tau, work, &lwork, &info);
  PG_TRY(lapack(ctx, "dgeqrf", info));
  for (int j = 0; j < n; j++)
    for (int i = 0; i < k; i++) r[(size_t)j * k + i] = i <= j ? a[(size_t)j * m + i] : 0;
fail:
  free(tau);
  free(work);
  return status;
}

/* s[min(m, n)], decreasing, of a [m, n] by columns, which is used up. */
static int singular_values(pg_context *ctx, int m, int n, double *a, double *s) {
  const int k = m < n ? m : n, query = -1, one = 1;
  int *iwork = malloc(8 * (size_t)k * sizeof *iwork), info, lwork, status = 0;
  double *work = NULL, size, none;
  dgesdd_("N", &m, &n, a, &m, s, &none, &one, &none, &one, &size, &query, iwork, &info);
  lwork = (int)size;
  work = malloc((size_t)lwork * sizeof *work);
  if (!iwork || !work) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for singular values"));
  dgesdd_("N", &m, &n, a, &m, s, &none, &one, &none, &one, work, &lwork, iwork, &info);
  PG_TRY(lapack(ctx, "dgesdd", info));
fail:
  free(iwork);
  free(work);
  return status;
}

/* x [n, k + 1] by columns: k columns of y [n, k] by rows, scaled, and -lse of the rows, or ones. */
static void augment(double *x, const float *y, int64_t n, int64_t k, double scale,
                    const pg__logit_row *rows) {
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < k; j++) x[j * n + i] = scale * (double)y[i * k + j];
    x[k * n + i] = rows ? -rows[i].logsumexp : 1;
  }
}

static void summarise(const double *s, int64_t count, double largest_side, pg_log_rank *out) {
  double sum = 0, squares = 0, entropy = 0;
  for (int64_t i = 0; i < count; i++) {
    sum += s[i];
    squares += s[i] * s[i];
    out->rank += s[i] > largest_side * 0x1p-52 * s[0];
  }
  for (int64_t i = 0; i < count && s[i] > 0; i++) entropy -= s[i] / sum * log(s[i] / sum);
  out->largest = s[0];
  out->effective = s[0] > 0 ? exp(entropy) : 0;
  out->stable = s[0] > 0 ? squares / (s[0] * s[0]) : 0;
}

/* Where the rows and the hidden states come from: a model's panel, or `hidden`. */
typedef struct source {
  const pg_model *model;
  pg_activations *a;
  const pg_panel *panel;
  pg_comm *comm;
  const pg_tensor *hidden;
} source;

static int read_source(const source *from, const pg_tensor *head, double scale, pg__logit_row *rows,
                       float *inputs) {
  if (from->hidden) return pg__state_logit_rows(head, from->hidden, scale, rows, inputs);
  return pg__panel_logit_rows(from->model, from->a, from->panel, from->comm,
                              "the rank of log-probabilities", rows, inputs);
}

static int log_rank(const source *from, const pg_tensor *head, double scale, int64_t n,
                    pg_log_rank *out, double *values) {
  pg_context *ctx = head->context;
  const double start = pg__now();
  const int64_t v = head->shape[0], d = head->shape[1], k = d + 1;
  const int64_t k1 = pg__min(n, k), k2 = pg__min(v, k), most = pg__max(n, v);
  const int threads = omp_get_max_threads();
  pg__logit_row *rows = malloc((size_t)n * sizeof *rows);
  float *plain = malloc((size_t)(most * d) * sizeof *plain);
  double *x = malloc((size_t)(most * k) * sizeof *x), *r1 = malloc((size_t)(k1 * k) * sizeof *r1);
  double *r2 = malloc((size_t)(k2 * k) * sizeof *r2), *s = malloc((size_t)k * sizeof *s);
  double *product = malloc((size_t)(k1 * k2) * sizeof *product);
  int status = 0;
  omp_set_num_threads(ctx->threads > 0 ? ctx->threads : threads);
  if (most * k > INT32_MAX)
    PG_TRY(pg_fail(ctx, PG_EINVAL,
                   "the rank of log-probabilities of %lld positions and %lld tokens in %lld "
                   "dimensions: allowed are 2^31 numbers in a factor",
                   (long long)n, (long long)v, (long long)k));
  if (!rows || !plain || !x || !r1 || !r2 || !product || !s)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld positions and %lld tokens times %lld",
                   (long long)n, (long long)v, (long long)k));
  *out = (pg_log_rank){.bound = pg__min(k1, k2)};
  PG_TRY(read_source(from, head, scale, rows, plain));
  augment(x, plain, n, d, scale, rows);
  PG_TRY(triangle(ctx, (int)n, (int)k, x, r1));
  PG_TRY(pg_tensor_read(head, plain));
  augment(x, plain, v, d, 1, NULL);
  PG_TRY(triangle(ctx, (int)v, (int)k, x, r2));
  cblas_dgemm(CblasColMajor, CblasNoTrans, CblasTrans, (int)k1, (int)k2, (int)k, 1, r1, (int)k1, r2,
              (int)k2, 0, product, (int)k1);
  PG_TRY(singular_values(ctx, (int)k1, (int)k2, product, s));
  summarise(s, out->bound, (double)most, out);
  if (values) memcpy(values, s, (size_t)out->bound * sizeof *values);
  out->seconds = pg__now() - start;
fail:
  omp_set_num_threads(threads);
  free(rows);
  free(plain);
  free(x);
  free(r1);
  free(r2);
  free(product);
  free(s);
  return status;
}

int pg_panel_log_rank(const pg_model *model, pg_activations *a, const pg_panel *panel,
                      pg_comm *comm, pg_log_rank *out, double *values) {
  const source from = {model, a, panel, comm, NULL};
  const int status = log_rank(&from, pg_model_head(model)->value,
                              pg_model_get_config(model)->logit_scale, panel->tokens, out, values);
  if (status < 0 && comm) pg_comm_fail(comm, pg_context_message(pg_model_context(model)));
  return status;
}

int pg_log_rank_states(const pg_tensor *head, const pg_tensor *hidden, double scale,
                       pg_log_rank *out, double *values) {
  const source from = {.hidden = hidden};
  const int status = pg__check_states(head, hidden);
  return status < 0 ? status : log_rank(&from, head, scale, hidden->shape[0], out, values);
}
