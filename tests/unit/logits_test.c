/* Statistics of logits, attention logits and the rank of log-probabilities (core/logits.c,
 * core/attention_logits.c, core/log_rank.c) against plain loops, and the size of weights
 * (core/weight_size.c). PG_TEST_DEVICE=cuda: on another device. */
#include "core/logits.h"
#include "core/model_internal.h"
#include "core/panel.h"
#include "core/weight_size.h"
#include "model_support.h"

#include <float.h>

static pg_context *ctx;

/* LAPACK, Fortran's calling convention. */
extern void dgesdd_(const char *job, const int *m, const int *n, double *a, const int *lda,
                    double *s, double *u, const int *ldu, double *vt, const int *ldvt, double *work,
                    const int *lwork, int *iwork, int *info);

/* Singular values of a [m, n] by columns, which is used up. */
static void singular_values(int m, int n, double *a, double *s) {
  const int one = 1, lwork = 1 << 20;
  double *work = malloc((size_t)lwork * sizeof *work), none;
  int *iwork = malloc(8 * (size_t)(m < n ? m : n) * sizeof *iwork), info;
  if (!work || !iwork) abort();
  dgesdd_("N", &m, &n, a, &m, s, &none, &one, &none, &one, work, &lwork, iwork, &info);
  if (info) abort();
  free(work);
  free(iwork);
}

/* A panel of `count` pieces of these lengths with random ids. */
static pg_panel *make_panel(const int64_t *lengths, size_t count, int64_t vocab) {
  pg_panel *panel = calloc(1, sizeof *panel);
  if (!panel) abort();
  panel->pieces = malloc(count * sizeof *panel->pieces);
  if (!panel->pieces) abort();
  for (panel->count = 0; panel->count < count; panel->count++) {
    panel->pieces[panel->count] = (pg_panel_piece){lengths[panel->count], panel->tokens};
    panel->tokens += lengths[panel->count];
  }
  panel->ids = make_ids(panel->tokens, vocab, 5);
  panel->targets = make_ids(panel->tokens, vocab, 6);
  return panel;
}

static void drop_panel(pg_panel *panel) {
  free(panel->ids);
  free(panel->targets);
  free(panel->pieces);
  free(panel);
}

typedef struct kase {
  shape size;
  double scale;
  pg_head_config head;
  pg_dtype compute;
} kase;

static const int64_t lengths[] = {11, 3, 11, 1, 7};

static const kase cases[] = {
    {{2, 24, 3, 8, 40, 53, 4, 11}, 1, {0}, PG_F32},
    {{1, 17, 1, 2, 9, 101, 1, 11}, .7, {0}, PG_F32},
    {{1, 16, 2, 8, 24, 37, 3, 13}, 2.5, {.rank = 5, .extra = 6}, PG_F32},
    {{2, 24, 3, 8, 40, 19, 4, 11}, 1, {0}, PG_F32}, /* fewer classes than dimensions */
    {{1, 32, 2, 16, 24, 41, 3, 11}, 1, {0}, PG_BF16},
};

typedef struct subject {
  pg_model *model;
  pg_activations *a;
  pg_panel *panel;
  int64_t n, classes, d; /* d: what the head's last matrix reads */
} subject;

static subject open_case(const kase *k) {
  subject s;
  pg_model_config c = make_config(&k->size);
  c.logit_scale = k->scale;
  c.head = k->head;
  s.model = make_model(ctx, &c, 9);
  if (k->compute != PG_F32) MUST(ctx, pg_model_set_compute(s.model, k->compute));
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(s.model), k->compute, k->size.batch,
                               k->size.time, PG_KEEP_NOTHING, &s.a));
  s.panel = make_panel(lengths, PG_COUNT(lengths), c.vocab);
  s.n = s.panel->tokens;
  s.classes = pg_model_head(s.model)->rows;
  s.d = pg_model_head(s.model)->columns;
  return s;
}

static void close_case(subject *s) {
  drop_panel(s->panel);
  pg_activations_free(s->a);
  pg_model_free(s->model);
}

/* Hidden states of position `at` of piece p, one sequence at a time, in fp64. */
static void hidden_of(const subject *s, const pg_panel_piece *p, int64_t at, double *h) {
  const int64_t d = s->a->config.width;
  const void *hidden;
  MUST(ctx, pg_model_forward(s->model, s->a, s->panel->ids + p->first, 1, p->length, &hidden));
  if (s->a->compute == PG_BF16) {
    uint16_t half[64];
    MUST(ctx, ctx->kernels->download(ctx->queue, half, (const uint16_t *)hidden + at * d,
                                     (size_t)d * sizeof *half));
    for (int64_t j = 0; j < d; j++) {
      const uint32_t bits = (uint32_t)half[j] << 16;
      float x;
      memcpy(&x, &bits, sizeof x);
      h[j] = x;
    }
  } else {
    float x[64];
    MUST(ctx, ctx->kernels->download(ctx->queue, x, (const float *)hidden + at * d,
                                     (size_t)d * sizeof *x));
    for (int64_t j = 0; j < d; j++) h[j] = x[j];
  }
}

/* z [n, classes] in fp64: scale * U h, or scale * A (B h). */
static double *all_logits(const subject *s) {
  const pg_parameter *head = pg_model_head(s->model), *inner = pg_model_head_inner(s->model);
  const int64_t width = s->a->config.width;
  const double scale = s->a->config.logit_scale;
  float *u = read_floats(head->value), *b = inner ? read_floats(inner->value) : NULL;
  double *z = malloc((size_t)(s->n * s->classes) * sizeof *z), h[64], x[64];
  if (!z) abort();
  for (size_t k = 0; k < s->panel->count; k++)
    for (int64_t t = 0; t < s->panel->pieces[k].length; t++) {
      double *row = z + (s->panel->pieces[k].first + t) * s->classes;
      hidden_of(s, &s->panel->pieces[k], t, h);
      for (int64_t i = 0; i < s->d; i++) {
        x[i] = b ? 0 : h[i];
        for (int64_t j = 0; b && j < width; j++) x[i] += (double)b[i * width + j] * h[j];
      }
      for (int64_t i = 0; i < s->classes; i++) {
        row[i] = 0;
        for (int64_t j = 0; j < s->d; j++) row[i] += scale * (double)u[i * s->d + j] * x[j];
      }
    }
  free(u);
  free(b);
  return z;
}

/* Logits of at most 64 products in fp32, of size about 1 to 10: an absolute error of 64 roundings
 * of that, and batches of another size round hidden states differently; 1e-5 is ten times that. In
 * bf16 hidden states of another batch may differ by a rounding of 2^-9. */
static double slack(const kase *k) {
  return k->compute == PG_BF16 ? 3e-2 : 1e-5;
}

TEST(the_eight_statistics) {
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    subject s = open_case(&cases[i]);
    double *z = all_logits(&s);
    pg_logits x, e = {.logsumexp_max = -INFINITY};
    MUST(ctx, pg_panel_logits(s.model, s.a, s.panel, NULL, &x));
    for (int64_t p = 0; p < s.n; p++) {
      const double *row = z + p * s.classes;
      double mean = 0, high = -INFINITY, sum = 0, entropy = 0;
      for (int64_t c = 0; c < s.classes; c++) mean += row[c] / (double)s.classes;
      for (int64_t c = 0; c < s.classes; c++) high = fmax(high, row[c]);
      for (int64_t c = 0; c < s.classes; c++) {
        sum += exp(row[c] - high);
        e.rms += row[c] * row[c] / (double)(s.n * s.classes);
        e.centered_rms += (row[c] - mean) * (row[c] - mean) / (double)(s.n * s.classes);
        e.max_abs = fmax(e.max_abs, fabs(row[c]));
        e.centered_max_abs = fmax(e.centered_max_abs, fabs(row[c] - mean));
      }
      const double lse = high + log(sum);
      for (int64_t c = 0; c < s.classes; c++) entropy -= exp(row[c] - lse) * (row[c] - lse);
      e.logsumexp_mean += lse / (double)s.n;
      e.logsumexp_max = fmax(e.logsumexp_max, lse);
      e.entropy_mean += entropy / (double)s.n;
      e.prob_max_mean += exp(high - lse) / (double)s.n;
    }
    const double t = slack(&cases[i]);
    CHECK_CLOSE(x.rms, sqrt(e.rms), t);
    CHECK_CLOSE(x.centered_rms, sqrt(e.centered_rms), t);
    CHECK_CLOSE(x.max_abs, e.max_abs, t);
    CHECK_CLOSE(x.centered_max_abs, e.centered_max_abs, t);
    CHECK_CLOSE(x.logsumexp_mean, e.logsumexp_mean, t);
    CHECK_CLOSE(x.logsumexp_max, e.logsumexp_max, t);
    CHECK_CLOSE(x.entropy_mean, e.entropy_mean, t);
    CHECK_CLOSE(x.prob_max_mean, e.prob_max_mean, t);
    CHECK(x.seconds > 0 && x.centered_rms < x.rms, "case %zu", i);
    free(z);
    close_case(&s);
  }
}

TEST(the_rank_of_log_probabilities) {
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    subject s = open_case(&cases[i]);
    double *z = all_logits(&s), *sigma = malloc((size_t)s.n * sizeof *sigma), sum = 0, entropy = 0;
    double values[65], squares = 0;
    if (!sigma) abort();
    for (int64_t p = 0; p < s.n; p++) {
      double *row = z + p * s.classes, lse = 0;
      for (int64_t c = 0; c < s.classes; c++) lse += exp(row[c]);
      for (int64_t c = 0; c < s.classes; c++) row[c] -= log(lse);
    }
    /* By rows: its transpose to LAPACK, of the same singular values. */
    singular_values((int)s.classes, (int)s.n, z, sigma);
    pg_log_rank r;
    MUST(ctx, pg_panel_log_rank(s.model, s.a, s.panel, NULL, &r, values));
    const int64_t bound = pg__min(pg__min(s.n, s.classes), s.d + 1);
    CHECK(r.bound == bound, "case %zu: bound %lld, not %lld", i, (long long)r.bound,
          (long long)bound);
    for (int64_t k = 0; k < r.bound; k++) {
      CHECK(fabs(values[k] - sigma[k]) <= slack(&cases[i]) * sigma[0], "case %zu, %lld: %g, not %g",
            i, (long long)k, values[k], sigma[k]);
      sum += values[k], squares += values[k] * values[k];
    }
    for (int64_t k = 0; k < r.bound; k++) entropy -= values[k] / sum * log(values[k] / sum);
    /* The weights are noise: no singular value but those that must vanish is anywhere near 0. */
    CHECK(r.rank == r.bound, "case %zu: rank %lld of %lld", i, (long long)r.rank,
          (long long)r.bound);
    CHECK(r.largest == values[0] && r.seconds > 0, "sigma_1");
    CHECK_CLOSE(r.effective, exp(entropy), 1e-12);
    CHECK_CLOSE(r.stable, squares / (values[0] * values[0]), 1e-12);
    free(z);
    free(sigma);
    close_case(&s);
  }
}

TEST(a_head_of_low_rank_shows) {
  subject s = open_case(&cases[0]);
  pg_tensor *head = pg_model_head(s.model)->value;
  float *u = read_floats(head);
  for (int64_t i = 0; i < s.classes; i++) /* columns 3 and up are multiples of the first three */
    for (int64_t j = 3; j < s.d; j++) u[i * s.d + j] = 2 * u[i * s.d + j % 3];
  MUST(ctx, pg_tensor_write(head, u));
  pg_log_rank r;
  MUST(ctx, pg_panel_log_rank(s.model, s.a, s.panel, NULL, &r, NULL));
  CHECK(r.rank == 4 && r.bound == 25, "rank %lld", (long long)r.rank);
  for (int64_t i = 0; i < s.classes * s.d; i++) u[i] = 0; /* uniform: one row for all */
  MUST(ctx, pg_tensor_write(head, u));
  MUST(ctx, pg_panel_log_rank(s.model, s.a, s.panel, NULL, &r, NULL));
  CHECK(r.rank == 1, "rank %lld", (long long)r.rank);
  CHECK_CLOSE(r.largest, log(53) * sqrt((double)(s.n * 53)), 1e-12);
  pg_logits z;
  MUST(ctx, pg_panel_logits(s.model, s.a, s.panel, NULL, &z));
  CHECK(z.rms == 0 && z.centered_max_abs == 0, "zeros");
  CHECK_CLOSE(z.entropy_mean, log(53), 1e-12);
  CHECK_CLOSE(z.prob_max_mean, 1. / 53, 1e-12);
  u[7] = NAN;
  MUST(ctx, pg_tensor_write(head, u));
  CHECK(pg_panel_logits(s.model, s.a, s.panel, NULL, &z) == PG_ENONFINITE, "a NaN");
  CHECK(strstr(pg_context_message(ctx), "position 0 at token 0"), "%s", pg_context_message(ctx));
  CHECK(pg_panel_log_rank(s.model, s.a, s.panel, NULL, &r, NULL) == PG_ENONFINITE, "a NaN");
  free(u);
  close_case(&s);
}

/* Queries and keys of a forward pass that keeps them. */
static void read_rows(const subject *s, pg_dtype type, const void *x, int64_t n, double *out) {
  (void)s;
  float *wide = malloc((size_t)n * sizeof *wide);
  uint16_t *half = (uint16_t *)(void *)wide;
  if (!wide) abort();
  const size_t bytes = (size_t)n * (type == PG_BF16 ? sizeof *half : sizeof *wide);
  MUST(ctx, ctx->kernels->download(ctx->queue, wide, x, bytes));
  for (int64_t i = 0; i < n; i++) {
    if (type == PG_BF16) {
      const uint32_t bits = (uint32_t)half[i] << 16;
      float v;
      memcpy(&v, &bits, sizeof v);
      out[i] = v;
    } else {
      out[i] = wide[i];
    }
  }
  free(wide);
}

TEST(the_largest_attention_logit_of_every_head) {
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    subject s = open_case(&cases[i]);
    const pg_model_config *c = pg_model_get_config(s.model);
    const int64_t inner = c->heads * c->head_dim, count = c->layers * c->heads;
    pg_activations *kept;
    const void *hidden;
    float largest[16];
    double expected[16], seconds = 0;
    double *q = malloc((size_t)(2 * c->context * inner) * sizeof *q), *k = q + c->context * inner;
    if (!q) abort();
    for (int64_t h = 0; h < count; h++) expected[h] = -INFINITY;
    MUST(ctx, pg_activations_new(ctx, c, cases[i].compute, 1, c->context, PG_KEEP_ALL, &kept));
    for (size_t p = 0; p < s.panel->count; p++) {
      const pg_panel_piece *piece = &s.panel->pieces[p];
      MUST(ctx,
           pg_model_forward(s.model, kept, s.panel->ids + piece->first, 1, piece->length, &hidden));
      for (int64_t layer = 0; layer < c->layers; layer++) {
        read_rows(&s, cases[i].compute, kept->blocks[layer].q, piece->length * inner, q);
        read_rows(&s, cases[i].compute, kept->blocks[layer].k, piece->length * inner, k);
        for (int64_t h = 0; h < c->heads; h++)
          for (int64_t t = 0; t < piece->length; t++)
            for (int64_t u = 0; u <= t; u++) {
              double sum = 0;
              for (int64_t e = 0; e < c->head_dim; e++)
                sum += q[t * inner + h * c->head_dim + e] * k[u * inner + h * c->head_dim + e];
              double *most = &expected[layer * c->heads + h];
              *most = fmax(*most, sum / sqrt((double)c->head_dim));
            }
      }
    }
    MUST(ctx, pg_panel_attention(s.model, s.a, s.panel, NULL, largest, &seconds));
    for (int64_t h = 0; h < count; h++)
      CHECK(fabs((double)largest[h] - expected[h]) <= slack(&cases[i]) * fabs(expected[h]) + 1e-6,
            "case %zu, %lld: %g, not %g", i, (long long)h, (double)largest[h], expected[h]);
    CHECK(seconds > 0, "cost");
    pg_activations_free(kept);
    free(q);
    close_case(&s);
  }
}

TEST(the_size_of_weights) {
  const int64_t sizes[][2] = {{1, 1}, {5, 3}, {3, 5}, {1031, 1021}, {3001, 401}};
  for (size_t k = 0; k < PG_COUNT(sizes); k++) {
    const int64_t m = sizes[k][0], n = sizes[k][1], dims[2] = {m, n};
    float *x = malloc(2 * (size_t)(m * n) * sizeof *x), *y = x + m * n;
    double *mean = malloc((size_t)n * sizeof *mean), *columns = calloc(2 * (size_t)n, sizeof *mean);
    if (!x || !mean || !columns) abort();
    pg_normals(3, k, 0, (size_t)(m * n), x);
    pg_normals(4, k, 0, (size_t)(m * n), y);
    double square = 0, product = 0, largest = 0, low = INFINITY, high = 0, widest = 0, drift = 0;
    for (int64_t i = 0; i < m; i++) {
      double row = 0;
      for (int64_t j = 0; j < n; j++) {
        const double a = x[i * n + j];
        row += a * a;
        columns[j] += a * a;
        columns[n + j] += a / (double)m;
        product += a * (double)y[i * n + j];
        largest = fmax(largest, fabs(a));
      }
      square += row, low = fmin(low, sqrt(row)), high = fmax(high, sqrt(row));
    }
    for (int64_t j = 0; j < n; j++) widest = fmax(widest, sqrt(columns[j]));
    for (int64_t j = 0; j < n; j++) drift += columns[n + j] * columns[n + j];
    pg_tensor *w, *s;
    pg_weight_size e;
    MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, dims, &w));
    MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, dims, &s));
    MUST(ctx, pg_tensor_write(w, x));
    MUST(ctx, pg_tensor_write(s, y));
    MUST(ctx, pg_weight_measure(w, s, "w", mean, &e));
    const double fp64 = 1e-12;
    CHECK_CLOSE(e.norm, sqrt(square), fp64);
    CHECK(e.largest == largest, "largest");
    CHECK_CLOSE(e.row_min, low, fp64);
    CHECK_CLOSE(e.row_max, high, fp64);
    CHECK_CLOSE(e.column_max, widest, fp64);
    CHECK_CLOSE(e.mean_row, sqrt(drift), 1e-10);
    CHECK(fabs(e.product - product) <= fp64 * square, "product");
    for (int64_t j = 0; j < n; j++)
      CHECK(fabs(mean[j] - columns[n + j]) <= fp64 * largest, "mean %lld", (long long)j);
    MUST(ctx, pg_weight_measure(w, NULL, "w", NULL, &e));
    CHECK(isnan(e.product), "no change");
    x[m * n - 1] = INFINITY;
    MUST(ctx, pg_tensor_write(w, x));
    CHECK(pg_weight_measure(w, NULL, "w", NULL, &e) == PG_ENONFINITE, "an infinity");
    CHECK(pg_weight_measure(s, w, "w", NULL, &e) == PG_ENONFINITE, "in the change");
    pg_tensor_free(w);
    pg_tensor_free(s);
    free(x);
    free(mean);
    free(columns);
  }
}

int main(void) {
  ctx = open_context(2);
  RUN(the_eight_statistics);
  RUN(the_rank_of_log_probabilities);
  RUN(a_head_of_low_rank_shows);
  RUN(the_largest_attention_logit_of_every_head);
  RUN(the_size_of_weights);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
