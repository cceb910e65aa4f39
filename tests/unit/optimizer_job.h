/* Shared by the optimizers' tests: parameters of one shape with an optimizer, updated by hand.
 * PG_TEST_DEVICE=cuda: on another device. */
#ifndef PG_OPTIMIZER_JOB_H
#define PG_OPTIMIZER_JOB_H

#include "core/internal.h"
#include "core/optimizer.h"
#include "unit.h"

/* Unit roundoff of fp32. Bars below are multiples of it. */
#define U 5.9604644775390625e-08

static pg_context *ctx;

/* ---- one or several parameters of one shape with an optimizer -------------------------------- */
#define MOST 6
typedef struct job {
  const pg_optimizer *o;
  double hypers[PG_MAX_HYPERS];
  int64_t rows, columns, updates[MOST];
  size_t count;
  pg_tensor *g[MOST], *s[MOST], *w[MOST], *slots[MOST][PG_MAX_SLOTS];
  pg_tensor *copy[MOST]; /* of w in bf16 */
  pg_tensor *moment;     /* [columns, columns] of all, the identity at first */
} job;

static inline pg_tensor *matrix(int64_t rows, int64_t columns) {
  pg_tensor *t = NULL;
  int status = pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &t);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  return t;
}

static inline job job_new(const char *name, size_t count, int64_t rows, int64_t columns) {
  job j = {.o = pg_optimizer_find(name), .rows = rows, .columns = columns, .count = count};
  pg_optimizer_defaults(j.o, j.hypers);
  j.moment = matrix(columns, columns);
  for (int64_t i = 0; i < columns; i++) {
    pg_tensor *one = NULL;
    const float value = 1;
    CHECK(pg_tensor_view(j.moment, i * columns + i, 0, NULL, NULL, &one) == 0, "view");
    CHECK(pg_tensor_write(one, &value) == 0, "write");
    pg_tensor_free(one);
  }
  for (size_t i = 0; i < count; i++) {
    j.g[i] = matrix(rows, columns);
    j.s[i] = matrix(rows, columns);
    j.w[i] = matrix(rows, columns);
    CHECK(pg_tensor_new(ctx, PG_BF16, 2, (int64_t[]){rows, columns}, &j.copy[i]) == 0, "copy");
    for (size_t k = 0; k < j.o->slot_count; k++) {
      int64_t shape[2];
      int ndim = pg_slot_dims(&j.o->slots[k], rows, columns, shape);
      CHECK(pg_tensor_new(ctx, j.o->slots[k].dtype, ndim, shape, &j.slots[i][k]) == 0, "slot");
    }
  }
  return j;
}

static inline void job_free(job *j) {
  pg_tensor_free(j->moment);
  for (size_t i = 0; i < j->count; i++) {
    pg_tensor_free(j->g[i]);
    pg_tensor_free(j->s[i]);
    pg_tensor_free(j->w[i]);
    pg_tensor_free(j->copy[i]);
    for (size_t k = 0; k < j->o->slot_count; k++) pg_tensor_free(j->slots[i][k]);
  }
}

static inline void set(job *j, const char *name, double value) {
  int index = pg_optimizer_hyper_index(j->o, name, NULL);
  CHECK(index >= 0, "%s", name);
  if (index >= 0) j->hypers[index] = value;
}
static inline double get(const job *j, const char *name, int offset) {
  return j->hypers[pg_optimizer_hyper_index(j->o, name, NULL) + offset];
}

/* One update of all parameters at `lr`. `apply` also applies it, and then increments come into
 * being only where `keep`. */
static inline void update(job *j, double lr, bool apply, bool keep) {
  const float *g[MOST], *moments[MOST];
  float *s[MOST], *w[MOST];
  uint16_t *copies[MOST];
  void *memory[MOST][PG_MAX_SLOTS];
  void *const *slots[MOST];
  for (size_t i = 0; i < j->count; i++) {
    g[i] = j->g[i]->data;
    moments[i] = j->moment->data;
    s[i] = keep ? j->s[i]->data : NULL;
    w[i] = j->w[i]->data;
    copies[i] = j->copy[i]->data;
    for (size_t k = 0; k < j->o->slot_count; k++) memory[i][k] = j->slots[i][k]->data;
    slots[i] = memory[i];
    j->updates[i]++;
  }
  pg_increment_group group = {.context = ctx,
                              .count = j->count,
                              .all_rows = j->rows,
                              .rows = j->rows,
                              .columns = j->columns,
                              .gradients = g,
                              .slots = slots,
                              .increments = s,
                              .moments = moments,
                              .updates = j->updates,
                              .hypers = j->hypers,
                              .lr = lr,
                              .values = w,
                              .apply = apply,
                              .keep = 1 - lr * get(j, "weight_decay", 0),
                              .copies = copies};
  CHECK(pg_optimizer_check(ctx, j->o, j->hypers) == 0, "%s", pg_context_message(ctx));
  int64_t held = pg_context_bytes(ctx);
  CHECK(j->o->increment(&group, j->o->self) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_context_bytes(ctx) == held, "%s kept device memory", j->o->name);
}
/* Increments only. */
static inline void increment(job *j, double lr) {
  update(j, lr, false, true);
}

/* w <- (1 - lr weight_decay) w + S, as a run applies it. */
static inline void apply(job *j, double lr) {
  for (size_t i = 0; i < j->count; i++) {
    pg_target to = {.value = j->w[i]->data,
                    .copy = j->copy[i]->data,
                    .keep = 1 - lr * get(j, "weight_decay", 0)};
    int status =
        ctx->kernels->apply(ctx->queue, 1, PG_F32, j->s[i]->data, j->rows * j->columns, 1, &to);
    CHECK(status == 0, "apply");
  }
}

static inline void write_doubles(pg_tensor *t, const double *x) {
  int64_t n = pg_tensor_elements(t);
  float *f = malloc((size_t)n * sizeof *f);
  for (int64_t i = 0; i < n; i++) f[i] = (float)x[i];
  CHECK(pg_tensor_write(t, f) == 0, "write");
  free(f);
}
static inline float *read_floats(const pg_tensor *t) {
  float *f = malloc((size_t)pg_tensor_elements(t) * sizeof *f);
  CHECK(pg_tensor_read(t, f) == 0, "read");
  return f;
}

/* max |got - want| <= bar. */
static inline void check_matrix(const char *what, const pg_tensor *got, const double *want,
                                double bar) {
  float *f = read_floats(got);
  double worst = 0;
  for (int64_t i = 0; i < pg_tensor_elements(got); i++) {
    double e = fabs((double)f[i] - want[i]);
    worst = e <= worst ? worst : e; /* NaN counts as worst */
  }
  CHECK(worst <= bar, "%s: off by %.3g, allowed %.3g", what, worst, bar);
  free(f);
}

static inline int job_start(void) {
  char message[256];
  pg_context_options options = {.device = unit_device(), .threads = 2};
  if (pg_context_new(&options, &ctx, message, sizeof message) == 0) return 0;
  printf("not ok: %s\n", message);
  return -1;
}
static inline int job_end(void) {
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "%lld tensors left",
        (long long)pg_context_live_tensors(ctx));
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}

#endif
