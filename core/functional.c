/* Functional size of a change of the head: logits by the device a chunk of positions at a time,
 * their statistics in fp64 on the host (change.c), and what the loss sends back by two products
 * with residuals that go up again. Downloaded are two numbers for every position and token, and as
 * many go up with `backward`: on another device than the CPU that is what the pass costs. */
#include "change.h"
#include "finite.h"
#include "model_internal.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Logits of a chunk: 16 MiB in fp32. */
#define CHUNK ((int64_t)1 << 22)

/* One of the two products of which the rows of logits come: scale * matrix h. */
typedef struct factor {
  const float *matrix; /* device, [V, d] */
  int64_t stride, d;
  double scale;
} factor;
/* Hidden states [n, d] of a batch, of this type. */
typedef struct states {
  const void *data;
  pg_dtype type;
} states;

typedef struct engine {
  pg_context *ctx;
  pg__form form;
  int64_t vocab, chunk; /* positions at a time */
  factor factors[2];
  /* With `backward`: S, and the matrix that meets q - p; widths are then equal. */
  bool backward;
  const float *step, *flow;
  int64_t step_stride, flow_stride;
  pg_functional sizes;
  pg_change *changes;
  const char *what; /* "panel position", for messages */

  float *rows[2]; /* host, [chunk, V] */
  double *probability;
  void *device[2], *wide, *sent; /* [chunk, V] twice, [chunk, d] hidden, [2 chunk, d] */
  float *back;                   /* host, [2 chunk, d] */
} engine;

static size_t logits_bytes(const engine *e) {
  return (size_t)(e->chunk * e->vocab) * sizeof(float);
}
static size_t wide_bytes(const engine *e) {
  return (size_t)(e->chunk * pg__max(e->factors[0].d, e->factors[1].d)) * sizeof(float);
}

static void engine_free(engine *e) {
  for (int i = 0; i < 2; i++) {
    free(e->rows[i]);
    if (e->device[i]) pg__release(e->ctx, e->device[i], logits_bytes(e));
  }
  if (e->wide) pg__release(e->ctx, e->wide, wide_bytes(e));
  if (e->sent) pg__release(e->ctx, e->sent, 2 * wide_bytes(e));
  free(e->probability);
  free(e->back);
}

static int engine_new(engine *e, int64_t positions) {
  pg_context *ctx = e->ctx;
  int status = 0;
  e->chunk = pg__max(1, pg__min(positions, CHUNK / e->vocab));
  for (int i = 0; i < 2; i++) {
    PG_TRY(pg__alloc(ctx, logits_bytes(e), "a chunk of logits", &e->device[i]));
    if (!(e->rows[i] = malloc(logits_bytes(e)))) goto memory;
  }
  PG_TRY(pg__alloc(ctx, wide_bytes(e), "hidden states", &e->wide));
  if (e->backward) PG_TRY(pg__alloc(ctx, 2 * wide_bytes(e), "gradients", &e->sent));
  e->probability = malloc(2 * (size_t)e->chunk * sizeof *e->probability);
  if (e->backward) e->back = malloc(2 * wide_bytes(e));
  if (e->probability && (e->back || !e->backward)) return 0;
memory:
  status = pg_fail(ctx, PG_ENOMEM, "no memory for a chunk of %lld logits",
                   (long long)(e->chunk * e->vocab));
fail:
  engine_free(e);
  return status;
}

static int chunk_logits(engine *e, int i, const states *s, int64_t first, int64_t n) {
  pg_context *ctx = e->ctx;
  const factor *f = &e->factors[i];
  const void *hidden = pg__element(s->type, s->data, first * f->d);
  int status;
  if (s->type != PG_F32) {
    PG_LAUNCH(ctx, convert, s->type, hidden, PG_F32, e->wide, n * f->d);
    hidden = e->wide;
  }
  PG_TRY(pg__product(ctx, f->scale, pg__plain(PG_F32, hidden, n, f->d, f->d),
                     pg__transpose(PG_F32, f->matrix, e->vocab, f->d, f->stride), 0, NULL, PG_F32,
                     e->device[i], e->vocab));
  PG_LAUNCH(ctx, download, e->rows[i], e->device[i], (size_t)(n * e->vocab) * sizeof *e->rows[i]);
fail:
  return status;
}

static double length(const float *x, const float *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const double v = (double)x[i] + (y ? (double)y[i] : 0);
    sum += v * v;
  }
  return sqrt(sum);
}

/* What the loss sends back: the rows hold the residuals. places[k] are the changes of a chunk. */
static int chunk_backward(engine *e, int64_t n, pg_change *const *places) {
  pg_context *ctx = e->ctx;
  const int64_t d = e->factors[0].d;
  const double k = fabs(e->factors[0].scale);
  const pg_functional *sizes = &e->sizes;
  float *sent[2] = {e->sent, (float *)e->sent + n * d};
  const float *matrices[2] = {e->flow, e->step};
  const int64_t strides[2] = {e->flow_stride, e->step_stride};
  int status;
  for (int i = 0; i < 2; i++) {
    PG_LAUNCH(ctx, upload, e->device[i], e->rows[i], (size_t)(n * e->vocab) * sizeof *e->rows[i]);
    PG_TRY(pg__product(ctx, k, pg__plain(PG_F32, e->device[i], n, e->vocab, e->vocab),
                       pg__plain(PG_F32, matrices[i], e->vocab, d, strides[i]), 0, NULL, PG_F32,
                       sent[i], d));
  }
  PG_LAUNCH(ctx, download, e->back, e->sent, (size_t)(2 * n * d) * sizeof *e->back);
  for (int64_t i = 0; i < n; i++) {
    const float *flow = e->back + i * d, *rows = e->back + (n + i) * d;
    const double p = e->probability[2 * i], q = e->probability[2 * i + 1];
    pg_change *c = places[i];
    const double t = tanh(c->range / 4), step = k * sizes->diameter;
    c->backward = length(flow, rows, d);
    c->flow = length(flow, NULL, d);
    c->rows = length(rows, NULL, d);
    c->backward_bound[0] = step * (1 - q) + k * sizes->before_diameter * t;
    c->backward_bound[1] = step * (1 - p) + k * sizes->after_diameter * t;
    const bool before = e->form == PG__BEFORE_AND_STEP;
    c->rows_bound = step * (1 - (before ? q : p));
    c->flow_bound = k * (before ? sizes->before_diameter : sizes->after_diameter) * t;
  }
fail:
  return status;
}

/* n positions of a batch, whose targets and changes these are. */
static int engine_run(engine *e, const states s[2], int64_t n, const int32_t *targets,
                      pg_change *const *places) {
  pg_context *ctx = e->ctx;
  int status = 0;
  for (int64_t first = 0; first < n; first += e->chunk) {
    const int64_t count = pg__min(e->chunk, n - first);
    int64_t bad = INT64_MAX; /* position * V + token */
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "the functional size was cancelled"));
    for (int i = 0; i < 2; i++) PG_TRY(chunk_logits(e, i, &s[i], first, count));
#pragma omp parallel for schedule(static) num_threads(ctx->threads) reduction(min : bad)
    for (int64_t i = 0; i < count; i++) {
      pg_change *c = places[first + i];
      const int64_t at = i * e->vocab;
      *c = (pg_change){.backward = NAN,
                       .backward_bound = {NAN, NAN},
                       .rows = NAN,
                       .rows_bound = NAN,
                       .flow = NAN,
                       .flow_bound = NAN};
      const int64_t token = pg__change(e->form, e->rows[0] + at, e->rows[1] + at, e->vocab,
                                       targets[first + i], e->backward, e->probability + 2 * i, c);
      if (token >= 0) bad = pg__min(bad, at + token);
    }
    if (bad != INT64_MAX)
      PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                     "the logits of %s %lld at token %lld are not finite: weights or the change "
                     "are too large or not finite",
                     e->what, (long long)(places[first + bad / e->vocab] - e->changes),
                     (long long)(bad % e->vocab)));
    if (e->backward) PG_TRY(chunk_backward(e, count, places + first));
  }
fail:
  return status;
}

/* D(base + sign S) for what the model's head is not. */
static int diameter_of(const pg_tensor *base, double sign, const pg_tensor *step, double *value) {
  pg_context *ctx = base->context;
  pg_tensor *sum = NULL;
  pg_diameter d;
  int status;
  if (sign == 0) {
    PG_TRY(pg_geometry_diameter(base, &d));
  } else {
    PG_TRY(pg_tensor_clone(base, &sum));
    const int64_t columns = sum->shape[1];
    const pg_view to = {sum->data, columns, 1};
    const pg_view from = {step->data, step->stride[0], step->stride[1]};
    PG_LAUNCH(ctx, binary, sign > 0 ? PG_ADD : PG_SUB, to, from, sum->shape[0], columns, to);
    PG_TRY(pg_geometry_diameter(sum, &d));
  }
  *value = d.value;
fail:
  pg_tensor_free(sum);
  return status;
}

static int check_matrix(const pg_tensor *m, int64_t vocab, int64_t d, pg_context *ctx,
                        const char *what) {
  if (m->context != ctx || m->dtype != PG_F32 || m->ndim != 2 || m->shape[0] != vocab ||
      m->shape[1] != d || m->stride[1] != 1 || m->stride[0] < d)
    return pg_fail(ctx, PG_EINVAL,
                   "%s must be F32 [%lld, %lld] with contiguous rows like the head, not %s of %d "
                   "dimensions [%lld, %lld]",
                   what, (long long)vocab, (long long)d, pg_dtype_name(m->dtype), m->ndim,
                   (long long)(m->ndim > 0 ? m->shape[0] : 1),
                   (long long)(m->ndim > 1 ? m->shape[1] : 1));
  return pg__check_finite(m, what);
}

/* The engine of a head and a change that comes after it or is in it. */
static int step_engine(engine *e, const pg_tensor *head, const pg_tensor *matrix, double scale,
                       const pg_functional_options *o) {
  pg_diameter d;
  int status;
  e->vocab = head->shape[0];
  e->form = o->before ? PG__BEFORE_AND_STEP : PG__AFTER_AND_STEP;
  PG_TRY(check_matrix(head, e->vocab, head->shape[1], e->ctx, "the head"));
  PG_TRY(check_matrix(matrix, e->vocab, head->shape[1], e->ctx, "the change of the head"));
  e->factors[0] = (factor){head->data, head->stride[0], head->shape[1], scale};
  e->factors[1] = (factor){matrix->data, matrix->stride[0], head->shape[1], scale};
  e->backward = o->backward;
  e->step = matrix->data, e->step_stride = matrix->stride[0];
  e->flow = head->data, e->flow_stride = head->stride[0];
  PG_TRY(pg_geometry_diameter(matrix, &d));
  e->sizes = (pg_functional){d.value, NAN, NAN, 0};
  if (o->backward) {
    PG_TRY(diameter_of(head, o->before ? 0 : -1, matrix, &e->sizes.before_diameter));
    PG_TRY(diameter_of(head, o->before ? 1 : 0, matrix, &e->sizes.after_diameter));
  }
fail:
  return status;
}

/* ---- over a panel ---------------------------------------------------------------------------- */
typedef struct job {
  engine *engine;
  const pg_model *models[2]; /* the second is NULL for one model */
  pg_activations *a[2];
  pg_change **places; /* [positions of a batch] */
} job;

static int batch(void *self, const int32_t *ids, const int32_t *targets,
                 const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  job *j = self;
  states s[2];
  int status;
  for (int i = 0; i < 2; i++) {
    pg_activations *a = j->a[j->models[i] ? i : 0];
    if (j->models[i]) PG_TRY(pg_model_forward(j->models[i], a, ids, sequences, length, NULL));
    s[i] = (states){a->hidden, a->compute};
  }
  for (int64_t k = 0; k < sequences; k++)
    for (int64_t t = 0; t < length; t++)
      j->places[k * length + t] = j->engine->changes + pieces[k].first + t;
  PG_TRY(engine_run(j->engine, s, sequences * length, targets, j->places));
fail:
  return status;
}

/* Every position was one rank's, and the others add 0: the same bits as alone. */
static int share_changes(pg_comm *comm, pg_context *ctx, pg_change *changes, int64_t count) {
  enum { FORWARD = 10, NUMBERS = FORWARD + 7, FIELDS = NUMBERS + 3 };
  double *wide = NULL;
  int status = 0;
  if (!comm || pg_comm_world(comm) == 1) return 0;
  if (!(wide = calloc((size_t)count * FIELDS, sizeof *wide)))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld changes", (long long)count));
  for (int64_t i = 0; i < count; i++) {
    const pg_change *c = &changes[i];
    double *w = wide + i * FIELDS;
    memcpy(w, &c->range, FORWARD * sizeof *w);
    memcpy(w + FORWARD, &c->backward, 7 * sizeof *w);
    w[NUMBERS] = (double)c->target, w[NUMBERS + 1] = (double)c->high;
    w[NUMBERS + 2] = (double)c->low;
  }
  PG_TRY(pg_comm_meet(comm, ctx, "a functional size", NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, wide, count * FIELDS));
  for (int64_t i = 0; i < count; i++) {
    pg_change *c = &changes[i];
    const double *w = wide + i * FIELDS;
    memcpy(&c->range, w, FORWARD * sizeof *w);
    memcpy(&c->backward, w + FORWARD, 7 * sizeof *w);
    c->target = (int64_t)w[NUMBERS], c->high = (int64_t)w[NUMBERS + 1];
    c->low = (int64_t)w[NUMBERS + 2];
  }
fail:
  free(wide);
  return status;
}

static int run_job(job *j, const pg_panel *panel, pg_comm *comm) {
  engine *e = j->engine;
  pg__panel_visit visit = {.what = "the functional size", .comm = comm, .batch = batch, .self = j};
  int status;
  e->what = "panel position";
  pg_activations_size(j->a[0], &visit.positions, &visit.time);
  if (j->models[1]) {
    int64_t positions, time;
    pg_activations_size(j->a[1], &positions, &time);
    visit.positions = pg__min(visit.positions, positions);
    visit.time = pg__min(visit.time, time);
  }
  PG_TRY(engine_new(e, pg__min(visit.positions, panel->tokens)));
  j->places = malloc((size_t)visit.positions * sizeof *j->places);
  if (!j->places) {
    status = pg_fail(e->ctx, PG_ENOMEM, "no memory for %lld places", (long long)visit.positions);
  } else {
    memset(e->changes, 0, (size_t)panel->tokens * sizeof *e->changes);
    status = pg__panel_pass(e->ctx, panel, &visit);
    if (status == 0) status = share_changes(comm, e->ctx, e->changes, panel->tokens);
  }
  free(j->places);
  engine_free(e);
fail:
  return status;
}

int pg_functional_change(const pg_model *model, pg_activations *a, const pg_panel *panel,
                         const pg_tensor *matrix, const pg_functional_options *options,
                         pg_functional *out, pg_change *changes) {
  engine e = {.ctx = pg_model_context(model), .changes = changes};
  job j = {.engine = &e, .models = {model, NULL}, .a = {a, a}};
  pg_tensor *head = NULL;
  const double start = pg__now();
  int status;
  PG_TRY(pg_model_head_matrix(model, &head));
  PG_TRY(step_engine(&e, head, matrix, pg_model_get_config(model)->logit_scale, options));
  PG_TRY(run_job(&j, panel, options->comm));
  *out = e.sizes;
  out->seconds = pg__now() - start;
fail:
  if (status < 0 && options->comm) pg_comm_fail(options->comm, pg_context_message(e.ctx));
  pg_tensor_free(head);
  return status;
}

int pg_functional_between(const pg_model *from, pg_activations *a, const pg_model *to,
                          pg_activations *b, const pg_panel *panel,
                          const pg_functional_options *options, pg_functional *out,
                          pg_change *changes) {
  pg_context *ctx = pg_model_context(to);
  const pg_model_config *c[2] = {pg_model_get_config(from), pg_model_get_config(to)};
  const pg_model *models[2] = {from, to};
  pg_tensor *heads[2] = {NULL, NULL};
  engine e = {.ctx = ctx, .form = PG__BEFORE_AND_AFTER, .changes = changes};
  job j = {.engine = &e, .models = {from, to}, .a = {a, b}};
  pg_tensor *step = NULL;
  const double start = pg__now();
  int status = 0;
  PG_TRY(pg__check_comparable(from, to));
  e.vocab = pg_model_classes(c[1]);
  if (a == b) return pg_fail(ctx, PG_EINVAL, "each of the two models needs its own activations");
  const bool alike = c[0]->width == c[1]->width && c[0]->logit_scale == c[1]->logit_scale;
  if (options->backward && !alike)
    return pg_fail(ctx, PG_EINVAL,
                   "the backward change of two models needs one width and one scale of logits, not "
                   "%lld, %g and %lld, %g",
                   (long long)c[0]->width, c[0]->logit_scale, (long long)c[1]->width,
                   c[1]->logit_scale);
  for (int i = 0; i < 2; i++) {
    PG_TRY(pg_model_head_matrix(models[i], &heads[i]));
    PG_TRY(check_matrix(heads[i], e.vocab, c[i]->width, ctx, "the head"));
    e.factors[i] = (factor){heads[i]->data, heads[i]->stride[0], c[i]->width, c[i]->logit_scale};
  }
  e.sizes = (pg_functional){NAN, NAN, NAN, 0};
  if (alike) {
    pg_diameter d;
    PG_TRY(pg_tensor_clone(heads[1], &step));
    const pg_view to_view = {step->data, step->stride[0], 1};
    const pg_view from_view = {heads[0]->data, heads[0]->stride[0], 1};
    PG_LAUNCH(ctx, binary, PG_SUB, to_view, from_view, step->shape[0], step->shape[1], to_view);
    PG_TRY(pg_geometry_diameter(step, &d));
    e.sizes.diameter = d.value;
    e.step = step->data, e.step_stride = step->stride[0];
    e.flow = heads[1]->data, e.flow_stride = heads[1]->stride[0];
  }
  if ((e.backward = options->backward)) {
    PG_TRY(diameter_of(heads[0], 0, NULL, &e.sizes.before_diameter));
    PG_TRY(diameter_of(heads[1], 0, NULL, &e.sizes.after_diameter));
  }
  PG_TRY(run_job(&j, panel, options->comm));
  *out = e.sizes;
  out->seconds = pg__now() - start;
fail:
  if (status < 0 && options->comm) pg_comm_fail(options->comm, pg_context_message(ctx));
  pg_tensor_free(step);
  pg_tensor_free(heads[0]);
  pg_tensor_free(heads[1]);
  return status;
}

int pg_functional_states(const pg_tensor *head, const pg_tensor *matrix, const pg_tensor *hidden,
                         const int32_t *targets, double scale, const pg_functional_options *options,
                         pg_functional *out, pg_change *changes) {
  pg_context *ctx = head->context;
  engine e = {.ctx = ctx, .changes = changes, .what = "position"};
  const double start = pg__now();
  pg_change **places = NULL;
  int status;
  if (head->ndim != 2 || head->shape[0] < 1)
    return pg_fail(ctx, PG_EINVAL, "the head must be a matrix [V, d], not of %d dimensions",
                   head->ndim);
  if (hidden->ndim != 2)
    return pg_fail(ctx, PG_EINVAL, "hidden states must be a matrix [n, d], not of %d dimensions",
                   hidden->ndim);
  const int64_t n = hidden->shape[0];
  PG_TRY(check_matrix(hidden, n, head->shape[1], ctx, "hidden states"));
  if (hidden->stride[0] != hidden->shape[1])
    return pg_fail(ctx, PG_EINVAL, "hidden states must be contiguous");
  PG_TRY(pg__check_ids(ctx, targets, n, head->shape[0], "target"));
  PG_TRY(step_engine(&e, head, matrix, scale, options));
  PG_TRY(engine_new(&e, pg__max(n, 1)));
  places = malloc((size_t)pg__max(n, 1) * sizeof *places);
  if (!places) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld places", (long long)n);
  } else {
    for (int64_t i = 0; i < n; i++) places[i] = changes + i;
    const states s = {hidden->data, PG_F32};
    status = engine_run(&e, (states[2]){s, s}, n, targets, places);
  }
  free(places);
  engine_free(&e);
  if (status < 0) goto fail;
  *out = e.sizes;
  out->seconds = pg__now() - start;
fail:
  return status;
}
