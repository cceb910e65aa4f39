/* Statistics of logits over a panel: a chunk of positions at a time comes down from the device. */
#include "logits.h"
#include "logits_internal.h"
#include "model_internal.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBERS = sizeof(pg__logit_row) / sizeof(double) };

/* The first token whose logit is not finite, -1: none. */
static int64_t measure(const float *z, int64_t vocab, pg__logit_row *out) {
  double low = INFINITY, high = -INFINITY, mean = 0, square = 0, centered = 0, sum = 0, moment = 0;
  for (int64_t i = 0; i < vocab; i++) {
    if (!isfinite(z[i])) return i;
    low = fmin(low, z[i]);
    high = fmax(high, z[i]);
    mean += z[i];
    square += (double)z[i] * z[i];
  }
  mean /= (double)vocab;
  for (int64_t i = 0; i < vocab; i++) {
    const double x = z[i] - high, p = exp(x);
    centered += (z[i] - mean) * (z[i] - mean);
    sum += p;
    moment += p * x;
  }
  *out = (pg__logit_row){.square = square / (double)vocab,
                         .centered_square = centered / (double)vocab,
                         .max_abs = fmax(fabs(low), fabs(high)),
                         .centered_max_abs = fmax(mean - low, high - mean),
                         .logsumexp = high + log(sum),
                         .entropy = log(sum) - moment / sum,
                         .prob_max = 1 / sum};
  return -1;
}

typedef struct job {
  const pg_model *model;
  pg_activations *a;
  pg__logit_row *rows; /* [tokens of the panel] */
  float *inputs;       /* [tokens, columns]; NULL: not wanted */
  float *host;         /* [chunk, V], or inputs */
} job;

static int batch(void *self, const int32_t *ids, const int32_t *targets,
                 const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  job *j = self;
  pg_context *ctx = pg_model_context(j->model);
  const pg_parameter *head = pg_model_head(j->model);
  const int64_t n = sequences * length, classes = head->rows, k = head->columns;
  int status;
  (void)targets;
  PG_TRY(pg_model_forward(j->model, j->a, ids, sequences, length, NULL));
  for (int64_t first = 0, count; first < n; first += count) {
    int64_t bad = INT64_MAX;
    count = pg__min(j->a->chunk, n - first);
    PG_TRY(pg__head_rows(j->model, j->a, first, count, j->host));
#pragma omp parallel for schedule(static) num_threads(ctx->threads) reduction(min : bad)
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = first + i, place = pieces[at / length].first + at % length;
      const int64_t token = measure(j->host + i * classes, classes, &j->rows[place]);
      if (token >= 0) bad = pg__min(bad, place * classes + token);
    }
    if (bad != INT64_MAX)
      PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                     "the logits of panel position %lld at token %lld are not finite: weights are "
                     "too large or not finite",
                     (long long)(bad / classes), (long long)(bad % classes)));
    if (!j->inputs) continue;
    PG_TRY(pg__head_inputs(j->model, j->a, first, count, j->host));
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = first + i, place = pieces[at / length].first + at % length;
      memcpy(j->inputs + place * k, j->host + i * k, (size_t)k * sizeof *j->host);
    }
  }
fail:
  return status;
}

/* Every position was one rank's, and the others add 0: the same bits as alone. */
static int share(pg_comm *comm, pg_context *ctx, const char *what, pg__logit_row *rows,
                 int64_t tokens, float *inputs, int64_t columns) {
  double *wide = NULL;
  int status = 0;
  if (!comm || pg_comm_world(comm) == 1) return 0;
  PG_TRY(pg_comm_meet(comm, ctx, what, NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, &rows->square, tokens * NUMBERS));
  if (!inputs) return 0;
  if (!(wide = malloc((size_t)columns * sizeof *wide)))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld numbers", (long long)columns));
  for (int64_t i = 0; i < tokens; i++) {
    float *row = inputs + i * columns;
    for (int64_t j = 0; j < columns; j++) wide[j] = (double)row[j];
    PG_TRY(pg_comm_sum_f64(comm, ctx, wide, columns));
    for (int64_t j = 0; j < columns; j++) row[j] = (float)wide[j];
  }
fail:
  free(wide);
  return status;
}

int pg__panel_logit_rows(const pg_model *model, pg_activations *a, const pg_panel *panel,
                         pg_comm *comm, const char *what, pg__logit_row *rows, float *inputs) {
  pg_context *ctx = pg_model_context(model);
  job j = {model, a, rows, inputs, NULL};
  pg__panel_visit visit = {.what = what, .comm = comm, .batch = batch, .self = &j};
  const pg_parameter *head = pg_model_head(model);
  int status;
  pg_activations_size(a, &visit.positions, &visit.time);
  memset(rows, 0, (size_t)panel->tokens * sizeof *rows);
  if (inputs) memset(inputs, 0, (size_t)(panel->tokens * head->columns) * sizeof *inputs);
  j.host = malloc((size_t)(a->chunk * pg__max(head->rows, head->columns)) * sizeof *j.host);
  if (!j.host)
    return pg_fail(ctx, PG_ENOMEM, "no memory for a chunk of %lld logits",
                   (long long)(a->chunk * head->rows));
  status = pg__panel_pass(ctx, panel, &visit);
  free(j.host);
  if (status == 0) status = share(comm, ctx, what, rows, panel->tokens, inputs, head->columns);
  return status;
}

int pg_panel_logits(const pg_model *model, pg_activations *a, const pg_panel *panel, pg_comm *comm,
                    pg_logits *out) {
  pg_context *ctx = pg_model_context(model);
  const double start = pg__now(), n = (double)panel->tokens;
  pg__logit_row *rows = malloc((size_t)panel->tokens * sizeof *rows);
  int status = 0;
  if (!rows)
    PG_TRY(
        pg_fail(ctx, PG_ENOMEM, "no memory for %lld rows of statistics", (long long)panel->tokens));
  PG_TRY(pg__panel_logit_rows(model, a, panel, comm, "the statistics of logits", rows, NULL));
  *out = (pg_logits){.logsumexp_max = -INFINITY};
  for (int64_t i = 0; i < panel->tokens; i++) {
    const pg__logit_row *r = &rows[i];
    out->rms += r->square / n;
    out->centered_rms += r->centered_square / n;
    out->max_abs = fmax(out->max_abs, r->max_abs);
    out->centered_max_abs = fmax(out->centered_max_abs, r->centered_max_abs);
    out->logsumexp_mean += r->logsumexp / n;
    out->logsumexp_max = fmax(out->logsumexp_max, r->logsumexp);
    out->entropy_mean += r->entropy / n;
    out->prob_max_mean += r->prob_max / n;
  }
  out->rms = sqrt(out->rms);
  out->centered_rms = sqrt(out->centered_rms);
  out->seconds = pg__now() - start;
fail:
  if (status < 0 && comm) pg_comm_fail(comm, pg_context_message(ctx));
  free(rows);
  return status;
}
