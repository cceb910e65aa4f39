/* Descriptors: lookup, defaults, range checks, slot shapes. Knows no optimizer by name. */
#include "comm.h"
#include "optimizers/compose.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

const pg_optimizer *pg_optimizer_at(size_t index) {
  return index < pg__optimizer_count ? pg__optimizers[index] : NULL;
}

const pg_optimizer *pg_optimizer_find(const char *name) {
  for (size_t i = 0; name && i < pg__optimizer_count; i++)
    if (strcmp(pg__optimizers[i]->name, name) == 0) return pg__optimizers[i];
  return NULL;
}

static int value_count(const pg_hyper *h) {
  return h->kind == PG_HYPER_PAIR ? 2 : 1;
}

int pg_optimizer_hyper_index(const pg_optimizer *o, const char *name, const pg_hyper **out) {
  int index = 0;
  for (size_t i = 0; i < o->hyper_count; i++) {
    if (strcmp(o->hypers[i].name, name) == 0) {
      if (out) *out = &o->hypers[i];
      return index;
    }
    index += value_count(&o->hypers[i]);
  }
  return -1;
}

void pg_optimizer_defaults(const pg_optimizer *o, double values[PG_MAX_HYPERS]) {
  memset(values, 0, PG_MAX_HYPERS * sizeof *values);
  for (size_t i = 0; i < o->hyper_count; i++)
    for (int k = 0; k < value_count(&o->hypers[i]); k++) *values++ = o->hypers[i].initial[k];
}

/* "from 0 to 1 (1 excluded)", "at least 0", "above 0", ... */
static void describe_range(const pg_hyper *h, char *text, size_t size) {
  const char *unit = h->kind == PG_HYPER_INTEGER ? "an integer " : "";
  bool low = isfinite(h->min), high = isfinite(h->max);
  if (low && high)
    snprintf(text, size, "%sfrom %.10g%s to %.10g%s", unit, h->min,
             h->open_min ? " (excluded)" : "", h->max, h->open_max ? " (excluded)" : "");
  else if (low)
    snprintf(text, size, "%sfinite and %s %.10g", unit, h->open_min ? "above" : "at least", h->min);
  else if (high)
    snprintf(text, size, "%sfinite and %s %.10g", unit, h->open_max ? "below" : "at most", h->max);
  else
    snprintf(text, size, "%sfinite", unit);
}

static bool in_range(const pg_hyper *h, double x) {
  if (!isfinite(x)) return false;
  if (h->kind == PG_HYPER_INTEGER && x != floor(x)) return false;
  return (h->open_min ? x > h->min : x >= h->min) && (h->open_max ? x < h->max : x <= h->max);
}

static int check_choice(pg_context *ctx, const pg_optimizer *o, const pg_hyper *h, double x) {
  char list[256] = "";
  size_t count = 0, used = 0;
  for (; h->choices[count]; count++) {
    int n =
        snprintf(list + used, sizeof list - used, "%s\"%s\"", count ? ", " : "", h->choices[count]);
    if (n > 0 && used + (size_t)n < sizeof list) used += (size_t)n;
  }
  if (x >= 0 && x < (double)count && x == floor(x)) return 0;
  return pg_fail(ctx, PG_EINVAL, "%s: %s has no choice number %g; it must be one of %s", o->name,
                 h->name, x, list);
}

int pg_optimizer_check(pg_context *ctx, const pg_optimizer *o, const double values[PG_MAX_HYPERS]) {
  for (size_t i = 0; i < o->hyper_count; i++) {
    const pg_hyper *h = &o->hypers[i];
    for (int k = 0; k < value_count(h); k++) {
      double x = *values++;
      char place[16] = "", range[128];
      if (h->kind == PG_HYPER_PAIR) snprintf(place, sizeof place, "[%d]", k + 1);
      if (h->kind == PG_HYPER_CHOICE) {
        int status = check_choice(ctx, o, h, x);
        if (status < 0) return status;
      } else if (h->kind == PG_HYPER_BOOLEAN) {
        if (x != 0 && x != 1)
          return pg_fail(ctx, PG_EINVAL, "%s: %s is %g; it must be true or false", o->name, h->name,
                         x);
      } else if (!in_range(h, x)) {
        describe_range(h, range, sizeof range);
        if (isnan(x) && isnan(h->initial[k]))
          return pg_fail(ctx, PG_EINVAL, "%s: %s%s has no default and must be given, %s", o->name,
                         h->name, place, range);
        return pg_fail(ctx, PG_EINVAL, "%s: %s%s = %.10g is not allowed; it must be %s", o->name,
                       h->name, place, x, range);
      }
    }
  }
  return 0;
}

int pg_slot_dims(const pg_slot *slot, int64_t rows, int64_t columns, int64_t shape[2]) {
  shape[0] = shape[1] = 1;
  switch (slot->shape) {
  case PG_SLOT_MATRIX: shape[0] = rows, shape[1] = columns; return 2;
  case PG_SLOT_ROW: shape[0] = rows; return 1;
  case PG_SLOT_COLUMN: shape[0] = columns; return 1;
  case PG_SLOT_ROWS_SQUARE: shape[0] = shape[1] = rows; return 2;
  case PG_SLOT_COLUMNS_SQUARE: shape[0] = shape[1] = columns; return 2;
  case PG_SLOT_ROWS_FACTOR: shape[0] = shape[1] = rows <= PG_FACTOR_LIMIT ? rows : 0; return 2;
  case PG_SLOT_COLUMNS_FACTOR:
    shape[0] = shape[1] = columns <= PG_FACTOR_LIMIT ? columns : 0;
    return 2;
  case PG_SLOT_SCALAR: break;
  }
  return 0;
}

double pg__bias_correction(double beta, int64_t n) {
  return -expm1((double)n * log(beta));
}

int pg__center_rows(const pg_increment_group *group, const float *x, float *y) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  const size_t bytes = (size_t)columns * sizeof(float);
  void *mean = NULL;
  int status;
  if (group->rows == group->all_rows) {
    PG_LAUNCH(ctx, center_rows, x, rows, columns, y);
    return 0;
  }
  PG_TRY(pg__alloc(ctx, bytes, "a mean row", &mean));
  const pg_view sum = {mean, columns, 1}, row = {mean, 0, 1};
  PG_LAUNCH(ctx, reduce, PG_SUM, pg__input_view(x, columns), rows, columns, 0, mean);
  PG_TRY(pg_comm_sum(group->comm, ctx, mean, columns));
  PG_TRY(pg_comm_finish(group->comm, ctx));
  PG_LAUNCH(ctx, scalar, PG_DIV, sum, (double)group->all_rows, false, 1, columns, sum);
  PG_LAUNCH(ctx, binary, PG_SUB, pg__input_view(x, columns), row, rows, columns,
            pg__matrix_view(y, columns));
fail:
  if (mean) pg__release(ctx, mean, bytes);
  return status;
}

int pg__each(const pg_increment_group *group, int64_t bytes, pg__one_fn *one) {
  pg_context *ctx = group->context;
  void *memory = NULL;
  int status;
  PG_TRY(pg__alloc(ctx, (size_t)bytes, "an optimizer's scratch", &memory));
  for (size_t i = 0; i < group->count; i++) PG_TRY(one(group, i, memory));
fail:
  if (memory) pg__release(ctx, memory, (size_t)bytes);
  return status;
}

int pg__mean(const pg_increment_group *group, size_t i, double mu) {
  pg_context *ctx = group->context;
  const int64_t n = group->rows * group->columns;
  int status;
  PG_LAUNCH(ctx, lerp, pg__matrix_view(group->slots[i][0], n),
            pg__input_view(group->gradients[i], n), 1 - mu, 1, n);
fail:
  return status;
}

int pg__mean_direction(const pg_increment_group *group, size_t i, double mu, bool nesterov,
                       float *x) {
  pg_context *ctx = group->context;
  const int64_t n = group->rows * group->columns;
  const pg_view mean = pg__matrix_view(group->slots[i][0], n);
  const float *from = nesterov ? group->gradients[i] : mean.data;
  int status;
  PG_TRY(pg__mean(group, i, mu));
  PG_LAUNCH(ctx, copy, x, from, (size_t)n * sizeof(float));
  if (nesterov) PG_LAUNCH(ctx, lerp, pg__matrix_view(x, n), mean, mu, 1, n);
fail:
  return status;
}

int pg__sum_direction(const pg_increment_group *group, size_t i, double mu, bool nesterov, float *x,
                      float *norm) {
  pg_context *ctx = group->context;
  float *b = group->slots[i][0];
  int status;
  PG_LAUNCH(ctx, momentum, mu, nesterov, 1, &group->gradients[i], &b, group->rows * group->columns,
            x, norm);
fail:
  return status;
}

int pg__deliver(const pg_increment_group *group, size_t i, double factor, const float *x) {
  pg_context *ctx = group->context;
  const pg_target to = pg__target(group, i);
  int status;
  PG_LAUNCH(ctx, apply, factor, PG_F32, x, group->rows * group->columns, 1, &to);
fail:
  return status;
}

int pg__matmul(pg_context *ctx, const float *a, bool transpose_a, const float *b, bool transpose_b,
               int64_t m, int64_t k, int64_t n, float *c) {
  const pg_gemm g = {.transpose_a = transpose_a,
                     .transpose_b = transpose_b,
                     .m = m,
                     .n = n,
                     .k = k,
                     .alpha = 1,
                     .a = a,
                     .b = b,
                     .c = c,
                     .lda = transpose_a ? m : k,
                     .ldb = transpose_b ? k : n,
                     .ldc = n};
  int status;
  PG_LAUNCH(ctx, gemm, &g);
fail:
  return status;
}

int pg__second_moment(pg_context *ctx, const float *g, int64_t rows, int64_t columns, bool of_rows,
                      double beta, float *moment) {
  const int64_t side = of_rows ? rows : columns;
  const pg_gemm product = {.transpose_a = !of_rows,
                           .transpose_b = of_rows,
                           .m = side,
                           .n = side,
                           .k = of_rows ? columns : rows,
                           .alpha = (float)(1 - beta),
                           .beta = (float)beta,
                           .a = g,
                           .b = g,
                           .c = moment,
                           .lda = columns,
                           .ldb = columns,
                           .ldc = side,
                           .symmetric = true};
  int status;
  PG_LAUNCH(ctx, gemm, &product);
fail:
  return status;
}

int pg__normalise(const pg_increment_group *group, bool by_column, pg_binary_op op, double floor,
                  float *x, float *norms) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  const pg_view all = pg__matrix_view(x, columns);
  const pg_view norm = pg__per_line_view(norms, by_column);
  int status;
  PG_LAUNCH(ctx, reduce, PG_NORM, all, rows, columns, by_column ? 0 : 1, norms);
  if (by_column && group->rows != group->all_rows) {
    PG_LAUNCH(ctx, unary, PG_SQUARE, norm, 1, columns, norm);
    PG_TRY(pg_comm_sum(group->comm, ctx, norms, columns));
    PG_TRY(pg_comm_finish(group->comm, ctx));
    PG_LAUNCH(ctx, unary, PG_SQRT, norm, 1, columns, norm);
  }
  PG_LAUNCH(ctx, scalar, op, norm, fmax(floor, FLT_MIN), false, by_column ? 1 : rows,
            by_column ? columns : 1, norm);
  PG_LAUNCH(ctx, binary, PG_DIV, all, norm, rows, columns, all);
fail:
  return status;
}
