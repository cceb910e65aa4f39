/* Statistics of logits over a panel: a chunk of positions at a time comes down from the device. */
#include "logits.h"
#include "finite.h"
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

/* Rows of statistics of logits z [n, classes] in host memory, row i into rows[place(i)] of `what`,
 * with place(i) = pieces[i / length].first + i % length, or first + i without pieces. */
static int measure_rows(pg_context *ctx, const char *what, const float *z, int64_t n,
                        int64_t classes, int64_t first, const pg_panel_piece *pieces,
                        int64_t length, pg__logit_row *rows) {
  int64_t bad = INT64_MAX;
#pragma omp parallel for schedule(static) num_threads(ctx->threads) reduction(min : bad)
  for (int64_t i = 0; i < n; i++) {
    const int64_t at = first + i, place = pieces ? pieces[at / length].first + at % length : at;
    const int64_t token = measure(z + i * classes, classes, &rows[place]);
    if (token >= 0) bad = pg__min(bad, place * classes + token);
  }
  if (bad == INT64_MAX) return 0;
  return pg_fail(ctx, PG_ENONFINITE,
                 "the logits of %s %lld at token %lld are not finite: weights are too large or "
                 "not finite",
                 what, (long long)(bad / classes), (long long)(bad % classes));
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
    count = pg__min(j->a->chunk, n - first);
    PG_TRY(pg__head_rows(j->model, j->a, first, count, j->host));
    PG_TRY(measure_rows(ctx, "panel position", j->host, count, classes, first, pieces, length,
                        j->rows));
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

/* Logits of a chunk: 16 MiB in fp32. */
#define CHUNK ((int64_t)1 << 22)

int pg__state_logit_rows(const pg_tensor *head, const pg_tensor *hidden, double scale,
                         pg__logit_row *rows, float *inputs) {
  pg_context *ctx = head->context;
  const int64_t classes = head->shape[0], d = head->shape[1], n = hidden->shape[0];
  const int64_t chunk = pg__max(1, pg__min(n, CHUNK / classes));
  const size_t bytes = (size_t)(chunk * classes) * sizeof(float);
  float *host = NULL;
  void *device = NULL;
  int status;
  PG_TRY(pg__check_finite(head, "the head"));
  PG_TRY(pg__check_finite(hidden, "hidden states"));
  if (!(host = malloc(bytes)))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a chunk of %lld logits",
                   (long long)(chunk * classes)));
  PG_TRY(pg__alloc(ctx, bytes, "a chunk of logits", &device));
  for (int64_t first = 0, count; first < n; first += count) {
    count = pg__min(chunk, n - first);
    const float *h = (const float *)hidden->data + first * hidden->stride[0];
    PG_TRY(
        pg__product(ctx, scale, pg__plain(PG_F32, h, count, d, hidden->stride[0]),
                    pg__transpose(PG_F32, (const float *)head->data, classes, d, head->stride[0]),
                    0, NULL, PG_F32, device, classes));
    PG_LAUNCH(ctx, download, host, device, (size_t)(count * classes) * sizeof *host);
    PG_TRY(measure_rows(ctx, "position", host, count, classes, first, NULL, 0, rows));
  }
  if (inputs) PG_TRY(pg_tensor_read(hidden, inputs));
fail:
  if (device) pg__release(ctx, device, bytes);
  free(host);
  return status;
}

int pg__check_states(const pg_tensor *head, const pg_tensor *hidden) {
  if (head->dtype == PG_F32 && hidden->dtype == PG_F32 && head->ndim == 2 && hidden->ndim == 2 &&
      head->shape[1] == hidden->shape[1] && head->shape[0] > 0 && hidden->shape[0] > 0 &&
      head->shape[1] > 0 && head->stride[1] == 1 && hidden->stride[1] == 1)
    return 0;
  return pg_fail(head->context, PG_EINVAL,
                 "logits of hidden states need a head [V, d] and hidden states [n, d], F32 with "
                 "contiguous rows, not [%lld, %lld] and [%lld, %lld]",
                 (long long)(head->ndim > 0 ? head->shape[0] : 1),
                 (long long)(head->ndim > 1 ? head->shape[1] : 1),
                 (long long)(hidden->ndim > 0 ? hidden->shape[0] : 1),
                 (long long)(hidden->ndim > 1 ? hidden->shape[1] : 1));
}

static void summarise(const pg__logit_row *rows, int64_t tokens, pg_logits *out) {
  const double n = (double)tokens;
  *out = (pg_logits){.logsumexp_max = -INFINITY};
  for (int64_t i = 0; i < tokens; i++) {
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
}

static int new_rows(pg_context *ctx, int64_t tokens, pg__logit_row **rows) {
  *rows = malloc((size_t)tokens * sizeof **rows);
  if (*rows) return 0;
  return pg_fail(ctx, PG_ENOMEM, "no memory for %lld rows of statistics", (long long)tokens);
}

int pg_panel_logits(const pg_model *model, pg_activations *a, const pg_panel *panel, pg_comm *comm,
                    pg_logits *out) {
  pg_context *ctx = pg_model_context(model);
  const double start = pg__now();
  pg__logit_row *rows = NULL;
  int status;
  PG_TRY(new_rows(ctx, panel->tokens, &rows));
  PG_TRY(pg__panel_logit_rows(model, a, panel, comm, "the statistics of logits", rows, NULL));
  summarise(rows, panel->tokens, out);
  out->seconds = pg__now() - start;
fail:
  if (status < 0 && comm) pg_comm_fail(comm, pg_context_message(ctx));
  free(rows);
  return status;
}

int pg_logits_states(const pg_tensor *head, const pg_tensor *hidden, double scale, pg_logits *out) {
  const double start = pg__now();
  pg__logit_row *rows = NULL;
  int status;
  PG_TRY(pg__check_states(head, hidden));
  PG_TRY(new_rows(head->context, hidden->shape[0], &rows));
  PG_TRY(pg__state_logit_rows(head, hidden, scale, rows, NULL));
  summarise(rows, hidden->shape[0], out);
  out->seconds = pg__now() - start;
fail:
  free(rows);
  return status;
}
