/* The gradient bottleneck: logits and what the head sends back by the device, a chunk of positions
 * at a time, and triangular solves in fp64 on the host. */
#include "bottleneck.h"
#include "finite.h"
#include "gram.h"
#include "model_internal.h"
#include "panel.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Logits of a chunk: 16 MiB. */
#define CHUNK ((int64_t)1 << 22)

/* The head's last matrix W [classes, k] reads x = B h, or h. The rest of the model sees N^T W^T g,
 * where N [k, rank] is the identity, or what the subspace of the backward pass makes of it; so the
 * subspace of g is spanned by W N, whose Gram matrix is N^T W^T W N. */
typedef struct engine {
  pg_context *ctx;
  const pg_tensor *outer, *inner; /* W; B [k, d] or NULL */
  double scale;
  int64_t classes, k, d, rank, chunk;
  double *factor, *map; /* host: [rank, rank]; N [k, rank] or NULL */
  pg_kept *kept;

  float *logits, *x, *dx, *norms, *losses; /* device: [chunk, classes], [chunk, k] twice, [chunk] */
  int32_t *targets;                        /* device */
  size_t bytes;
  float *dx_host, *norms_host, *losses_host;
  double *wide, *signal; /* [chunk, k], [chunk, rank] */
  char *memory, *host;
} engine;

static void engine_free(engine *e) {
  if (e->memory) pg__release(e->ctx, e->memory, e->bytes);
  free(e->host);
  free(e->factor);
  free(e->map);
}

/* N = B Q^T, or Q^T: basis [r, d] on the device. */
static int make_map(engine *e, const pg_tensor *basis) {
  pg_context *ctx = e->ctx;
  const int64_t r = basis->shape[0], d = basis->shape[1];
  float *narrow = malloc((size_t)(r * d) * sizeof *narrow), *b = NULL;
  int status = 0;
  e->map = malloc((size_t)(e->k * r) * sizeof *e->map);
  if (e->inner) b = malloc((size_t)(e->k * d) * sizeof *b);
  if (!narrow || !e->map || (e->inner && !b))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for the subspace of the backward pass"));
  PG_TRY(pg_tensor_read(basis, narrow));
  if (b) PG_TRY(pg_tensor_read(e->inner, b));
  for (int64_t i = 0; i < e->k; i++)
    for (int64_t j = 0; j < r; j++) {
      double sum = b ? 0 : (double)narrow[j * d + i];
      for (int64_t l = 0; b && l < d; l++) sum += (double)b[i * d + l] * (double)narrow[j * d + l];
      e->map[i * r + j] = sum;
    }
  e->rank = r;
fail:
  free(narrow);
  free(b);
  return status;
}

/* The factor of the subspace's Gram matrix. */
static int make_factor(engine *e, double *condition) {
  pg_context *ctx = e->ctx;
  const int64_t k = e->k, r = e->rank;
  double *gram = malloc((size_t)(k * k) * sizeof *gram), *part = NULL;
  int status = 0;
  if (!gram) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a Gram matrix of %lld", (long long)k));
  PG_TRY(pg__gram(e->outer, false, gram));
  if (e->map) {
    part = malloc((size_t)(k * r) * sizeof *part);
    e->factor = malloc((size_t)(r * r) * sizeof *e->factor);
    if (!part || !e->factor)
      PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a Gram matrix of %lld", (long long)r));
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)k, (int)r, (int)k, 1, gram, (int)k,
                e->map, (int)r, 0, part, (int)r);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)r, (int)r, (int)k, 1, e->map, (int)r,
                part, (int)r, 0, e->factor, (int)r);
  } else {
    e->factor = gram;
    gram = NULL;
  }
  PG_TRY(pg__gram_factor(ctx, e->factor, r, "the bottleneck of the head", condition));
fail:
  free(gram);
  free(part);
  return status;
}

/* Parts of one allocation, each on a cache line. */
static void *take(char *base, size_t *used, size_t bytes) {
  void *at = base ? base + *used : NULL;
  *used += pg__arena_size(bytes);
  return at;
}

static void lay_out(engine *e, char *device, char *host, size_t *device_bytes, size_t *host_bytes) {
  const size_t n = (size_t)e->chunk, k = (size_t)e->k, f = sizeof(float);
  *device_bytes = *host_bytes = 0;
  e->logits = take(device, device_bytes, n * (size_t)e->classes * f);
  e->x = take(device, device_bytes, n * (size_t)pg__max(e->k, e->d) * f);
  e->dx = take(device, device_bytes, n * (size_t)pg__max(e->k, e->d) * f);
  e->norms = take(device, device_bytes, n * f);
  e->losses = take(device, device_bytes, n * f);
  e->targets = take(device, device_bytes, n * sizeof(int32_t));
  e->dx_host = take(host, host_bytes, n * k * f);
  e->norms_host = take(host, host_bytes, n * f);
  e->losses_host = take(host, host_bytes, n * f);
  e->wide = take(host, host_bytes, n * k * sizeof(double));
  e->signal = e->map ? take(host, host_bytes, n * (size_t)e->rank * sizeof(double)) : e->wide;
}

/* outer, inner, scale, kept are set. */
static int engine_new(engine *e, const pg_tensor *basis, int64_t positions, pg_bottleneck *out) {
  pg_context *ctx = e->ctx;
  size_t host_bytes;
  int status;
  e->classes = e->outer->shape[0];
  e->k = e->rank = e->outer->shape[1];
  e->d = e->inner ? e->inner->shape[1] : e->k;
  PG_TRY(pg__check_finite(e->outer, "the head"));
  if (e->k >= e->classes)
    PG_TRY(pg_fail(ctx, PG_EINVAL,
                   "a head of %lld rows and %lld columns is no bottleneck: it needs more rows",
                   (long long)e->classes, (long long)e->k));
  if (basis && basis->shape[0] < e->k) PG_TRY(make_map(e, basis));
  PG_TRY(make_factor(e, &out->condition));
  out->condition = sqrt(out->condition);
  out->rank = e->rank;
  out->classes = e->classes;
  out->baseline = sqrt((double)e->rank / (double)e->classes);
  e->chunk = pg__max(1, pg__min(positions, CHUNK / e->classes));
  lay_out(e, NULL, NULL, &e->bytes, &host_bytes);
  PG_TRY(pg__alloc(ctx, e->bytes, "a chunk of logits", (void **)&e->memory));
  if (!(e->host = aligned_alloc(256, host_bytes)))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld positions", (long long)e->chunk));
  lay_out(e, e->memory, e->host, &e->bytes, &host_bytes);
  return 0;
fail:
  engine_free(e);
  return status;
}

/* What is not finite in the chunk's rows is in its losses or norms. */
static int report(engine *e, int64_t n, const int32_t *targets, pg_kept *const *places) {
  if (e->map)
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)e->rank, (int)e->k, 1,
                e->wide, (int)e->k, e->map, (int)e->rank, 0, e->signal, (int)e->rank);
  pg__gram_divide(e->ctx, e->factor, e->rank, e->signal, n);
  for (int64_t i = 0; i < n; i++) {
    double squares = 0;
    for (int64_t j = 0; j < e->rank; j++) {
      const double v = e->signal[i * e->rank + j];
      squares += v * v;
    }
    /* g comes multiplied by the scale of the logits, and so does the part that gets through. */
    const double norm = (double)e->norms_host[i], loss = (double)e->losses_host[i];
    if (!isfinite(norm) || !isfinite(loss) || !isfinite(squares))
      return pg_fail(e->ctx, PG_ENONFINITE,
                     "the logits of position %lld are not finite: weights or hidden states are too "
                     "large or not finite",
                     (long long)(places[i] - e->kept));
    *places[i] = (pg_kept){.kept = norm > 0 ? sqrt(squares) / norm : (double)NAN,
                           .norm = norm / fabs(e->scale),
                           .loss = loss,
                           .target = targets[i]};
  }
  return 0;
}

/* n positions: hidden [n, d] of this type. */
static int engine_run(engine *e, const void *hidden, pg_dtype type, int64_t n,
                      const int32_t *targets, pg_kept *const *places) {
  pg_context *ctx = e->ctx;
  const int64_t k = e->k, d = e->d;
  int status = 0;
  for (int64_t first = 0; first < n; first += e->chunk) {
    const int64_t count = pg__min(e->chunk, n - first);
    const void *x = pg__element(type, hidden, first * d);
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "the bottleneck was cancelled"));
    if (type != PG_F32) {
      PG_LAUNCH(ctx, convert, type, x, PG_F32, e->dx, count * d);
      x = e->dx;
    }
    if (e->inner) {
      PG_TRY(pg__product(ctx, 1, pg__plain(PG_F32, x, count, d, d),
                         pg__transpose(PG_F32, e->inner->data, k, d, e->inner->stride[0]), 0, NULL,
                         PG_F32, e->x, k));
      x = e->x;
    }
    PG_TRY(pg__product(ctx, 1, pg__plain(PG_F32, x, count, k, k),
                       pg__transpose(PG_F32, e->outer->data, e->classes, k, e->outer->stride[0]), 0,
                       NULL, PG_F32, e->logits, e->classes));
    PG_LAUNCH(ctx, upload, e->targets, targets + first, (size_t)count * sizeof *targets);
    PG_LAUNCH(ctx, cross_entropy, PG_F32, e->logits, count, e->classes, e->classes, e->targets,
              (float)e->scale, 1, true, e->losses);
    const pg_view rows = {e->logits, e->classes, 1};
    PG_LAUNCH(ctx, reduce, PG_NORM, rows, count, e->classes, 1, e->norms);
    PG_TRY(pg__product(ctx, 1, pg__plain(PG_F32, e->logits, count, e->classes, e->classes),
                       pg__plain(PG_F32, e->outer->data, e->classes, k, e->outer->stride[0]), 0,
                       NULL, PG_F32, e->dx, k));
    PG_LAUNCH(ctx, download, e->dx_host, e->dx, (size_t)(count * k) * sizeof *e->dx_host);
    PG_LAUNCH(ctx, download, e->norms_host, e->norms, (size_t)count * sizeof *e->norms_host);
    PG_LAUNCH(ctx, download, e->losses_host, e->losses, (size_t)count * sizeof *e->losses_host);
    for (int64_t i = 0; i < count * k; i++) e->wide[i] = (double)e->dx_host[i];
    PG_TRY(report(e, count, targets + first, places + first));
  }
fail:
  return status;
}

/* ---- over a panel ---------------------------------------------------------------------------- */
typedef struct job {
  engine *engine;
  const pg_model *model;
  pg_activations *a;
  pg_kept **places; /* [positions of a batch] */
} job;

static int batch(void *self, const int32_t *ids, const int32_t *targets,
                 const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  job *j = self;
  int status;
  PG_TRY(pg_model_forward(j->model, j->a, ids, sequences, length, NULL));
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t t = 0; t < length; t++)
      j->places[s * length + t] = j->engine->kept + pieces[s].first + t;
  PG_TRY(
      engine_run(j->engine, j->a->hidden, j->a->compute, sequences * length, targets, j->places));
fail:
  return status;
}

/* Every position was one rank's, and the others add 0: the same bits as alone. */
static int share(pg_comm *comm, pg_context *ctx, pg_kept *kept, int64_t count) {
  enum { FIELDS = 5 };
  double *wide = NULL;
  int status = 0;
  if (!comm || pg_comm_world(comm) == 1) return 0;
  if (!(wide = calloc((size_t)count * FIELDS, sizeof *wide)))
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld positions", (long long)count));
  for (int64_t i = 0; i < count; i++) {
    double *w = wide + i * FIELDS;
    w[0] = isnan(kept[i].kept) ? 0 : kept[i].kept;
    w[1] = isnan(kept[i].kept);
    w[2] = kept[i].norm;
    w[3] = kept[i].loss;
    w[4] = (double)kept[i].target;
  }
  PG_TRY(pg_comm_meet(comm, ctx, "a bottleneck", NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, wide, count * FIELDS));
  for (int64_t i = 0; i < count; i++) {
    const double *w = wide + i * FIELDS;
    kept[i] = (pg_kept){w[1] > 0 ? (double)NAN : w[0], w[2], w[3], (int64_t)w[4]};
  }
fail:
  free(wide);
  return status;
}

int pg_bottleneck_panel(const pg_model *model, pg_activations *a, const pg_panel *panel,
                        pg_comm *comm, pg_bottleneck *out, pg_kept *positions) {
  const pg_parameter *inner = pg_model_head_inner(model);
  engine e = {.ctx = pg_model_context(model),
              .outer = pg_model_head(model)->value,
              .inner = inner ? inner->value : NULL,
              .scale = pg_model_get_config(model)->logit_scale,
              .kept = positions};
  job j = {.engine = &e, .model = model, .a = a};
  pg__panel_visit visit = {.what = "the bottleneck", .comm = comm, .batch = batch, .self = &j};
  const double start = pg__now();
  int status;
  pg_activations_size(a, &visit.positions, &visit.time);
  PG_TRY(engine_new(&e, model->basis, pg__min(visit.positions, panel->tokens), out));
  j.places = malloc((size_t)visit.positions * sizeof *j.places);
  if (!j.places) {
    status = pg_fail(e.ctx, PG_ENOMEM, "no memory for %lld places", (long long)visit.positions);
  } else {
    memset(positions, 0, (size_t)panel->tokens * sizeof *positions);
    status = pg__panel_pass(e.ctx, panel, &visit);
    if (status == 0) status = share(comm, e.ctx, positions, panel->tokens);
  }
  free(j.places);
  engine_free(&e);
  if (status < 0) goto fail;
  out->seconds = pg__now() - start;
fail:
  if (status < 0 && comm) pg_comm_fail(comm, pg_context_message(e.ctx));
  return status;
}

/* ---- what comes from elsewhere --------------------------------------------------------------- */
static int check_rows(pg_context *ctx, const pg_tensor *t, int64_t columns, const char *what) {
  if (t->context != ctx || t->dtype != PG_F32 || t->ndim != 2 || t->shape[0] < 1 ||
      t->shape[1] < 1 || (columns > 0 && t->shape[1] != columns) || t->stride[1] != 1 ||
      t->stride[0] < t->shape[1])
    return pg_fail(ctx, PG_EINVAL,
                   "%s must be F32 [n, %lld] with contiguous rows, not %s of %d dimensions "
                   "[%lld, %lld]",
                   what, (long long)pg__max(columns, 1), pg_dtype_name(t->dtype), t->ndim,
                   (long long)(t->ndim > 0 ? t->shape[0] : 1),
                   (long long)(t->ndim > 1 ? t->shape[1] : 1));
  return 0;
}

int pg_bottleneck_states(const pg_tensor *head, const pg_tensor *hidden, const int32_t *targets,
                         double scale, pg_bottleneck *out, pg_kept *positions) {
  pg_context *ctx = head->context;
  engine e = {.ctx = ctx, .outer = head, .scale = scale, .kept = positions};
  const double start = pg__now();
  pg_kept **places = NULL;
  int status;
  PG_TRY(check_rows(ctx, head, 0, "the head"));
  PG_TRY(check_rows(ctx, hidden, head->shape[1], "hidden states"));
  if (hidden->stride[0] != hidden->shape[1])
    return pg_fail(ctx, PG_EINVAL, "hidden states must be contiguous");
  const int64_t n = hidden->shape[0];
  PG_TRY(pg__check_finite(hidden, "hidden states"));
  PG_TRY(pg__check_ids(ctx, targets, n, head->shape[0], "target"));
  PG_TRY(engine_new(&e, NULL, n, out));
  places = malloc((size_t)n * sizeof *places);
  if (!places) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld places", (long long)n);
  } else {
    for (int64_t i = 0; i < n; i++) places[i] = positions + i;
    status = engine_run(&e, hidden->data, PG_F32, n, targets, places);
  }
  free(places);
  engine_free(&e);
  if (status < 0) goto fail;
  out->seconds = pg__now() - start;
fail:
  return status;
}

int pg_bottleneck_gradient(const pg_tensor *head, const pg_tensor *gradient, double *kept) {
  pg_context *ctx = head->context;
  pg_tensor *moment = NULL, *norm = NULL;
  double *gram = NULL, *wide = NULL, squares = 0;
  float *narrow = NULL, length;
  int status;
  PG_TRY(check_rows(ctx, head, 0, "the head"));
  const int64_t d = head->shape[1], classes = head->shape[0], shape[2] = {d, d};
  const size_t count = (size_t)(d * d);
  PG_TRY(check_rows(ctx, gradient, d, "the gradient"));
  if (gradient->shape[0] != classes)
    return pg_fail(ctx, PG_EINVAL, "the gradient has %lld rows, the head %lld",
                   (long long)gradient->shape[0], (long long)classes);
  PG_TRY(pg__check_finite(head, "the head"));
  PG_TRY(pg__check_finite(gradient, "the gradient"));
  gram = malloc(2 * count * sizeof *gram);
  narrow = malloc(count * sizeof *narrow);
  if (!gram || !narrow)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a Gram matrix of %lld", (long long)d));
  wide = gram + count;
  PG_TRY(pg__gram(head, false, gram));
  PG_TRY(pg__gram_factor(ctx, gram, d, "the head", NULL));
  /* M = G^T U: its rows divided by L are those of (L^-1 U^T G)^T */
  PG_TRY(pg_tensor_new(ctx, PG_F32, 2, shape, &moment));
  PG_TRY(pg__product(ctx, 1, pg__transpose(PG_F32, gradient->data, classes, d, gradient->stride[0]),
                     pg__plain(PG_F32, head->data, classes, d, head->stride[0]), 0, NULL, PG_F32,
                     moment->data, d));
  PG_TRY(pg_tensor_new(ctx, PG_F32, 0, NULL, &norm));
  const pg_view all = {gradient->data, gradient->stride[0], 1};
  PG_LAUNCH(ctx, reduce, PG_NORM, all, classes, d, -1, norm->data);
  PG_TRY(pg_tensor_read(norm, &length));
  PG_TRY(pg_tensor_read(moment, narrow));
  for (size_t i = 0; i < count; i++) wide[i] = (double)narrow[i];
  pg__gram_divide(ctx, gram, d, wide, d);
  for (size_t i = 0; i < count; i++) squares += wide[i] * wide[i];
  *kept = length > 0 ? sqrt(squares) / (double)length : (double)NAN;
fail:
  free(gram);
  free(narrow);
  pg_tensor_free(moment);
  pg_tensor_free(norm);
  return status;
}
