/* Shared by the optimizers: the registry's list, and views for composing kernels. */
#ifndef PG_OPTIMIZERS_COMPOSE_H
#define PG_OPTIMIZERS_COMPOSE_H

#include "../internal.h"
#include "../model.h"
#include "../optimizer.h"
#include <math.h>

/* All registered descriptors, in order. */
extern const pg_optimizer *const pg__optimizers[];
extern const size_t pg__optimizer_count;

/* Entries of hyperparameter lists, by range. */
#define PG__FROM_0(name, initial, help)                                                            \
  { name, PG_HYPER_NUMBER, {initial}, 0, HUGE_VAL, false, true, NULL, help }
#define PG__SHARE(name, initial, help) /* [0, 1) */                                                \
  { name, PG_HYPER_NUMBER, {initial}, 0, 1, false, true, NULL, help }
#define PG__SHARES(name, first, second, help)                                                      \
  { name, PG_HYPER_PAIR, {first, second}, 0, 1, false, true, NULL, help }
#define PG__ABOVE_0(name, initial, help)                                                           \
  { name, PG_HYPER_NUMBER, {initial}, 0, HUGE_VAL, true, true, NULL, help }
#define PG__SWITCH(name, initial, help)                                                            \
  { name, PG_HYPER_BOOLEAN, {initial}, 0, 1, false, false, NULL, help }
#define PG__COUNT_TO(name, initial, most, help)                                                    \
  { name, PG_HYPER_INTEGER, {initial}, 0, most, false, false, NULL, help }
#define PG__COUNT_FROM_1(name, initial, help)                                                      \
  { name, PG_HYPER_INTEGER, {initial}, 1, 1e9, false, false, NULL, help }
#define PG__CHOICE(name, initial, last, choices, help)                                             \
  { name, PG_HYPER_CHOICE, {initial}, 0, last, false, false, choices, help }
#define PG__LR(initial) PG__FROM_0("lr", initial, "peak learning rate")
#define PG__WEIGHT_DECAY(initial)                                                                  \
  PG__FROM_0("weight_decay", initial, "decoupled: weights shrink by lr * weight_decay per update")

/* Row-major [rows, columns]. */
static inline pg_view pg__matrix_view(float *data, int64_t columns) {
  return (pg_view){data, columns, 1};
}
/* The same for input that no kernel writes (views carry no const). */
static inline pg_view pg__input_view(const float *data, int64_t columns) {
  return (pg_view){(float *)data, columns, 1};
}
/* One number per row, or with `columns` 1 a vector of numbers. */
static inline pg_view pg__per_row_view(float *data) {
  return (pg_view){data, 1, 0};
}
static inline pg_view pg__per_line_view(float *data, bool by_column) {
  return by_column ? (pg_view){data, 0, 1} : (pg_view){data, 1, 0};
}
/* What follows concerns parameter i of the group: for the text of an error. */
static inline void pg__on(const pg_increment_group *group, size_t i) {
  if (group->parameters) pg__at(group->context, group->parameters[i]->name, 0);
}
/* Where the increments of parameter i of the group go. */
static inline pg_target pg__target(const pg_increment_group *group, size_t i) {
  pg_target to = {.increment = group->increments[i]};
  if (group->apply)
    to.value = group->values[i], to.copy = group->copies[i], to.keep = group->keep,
    to.cautious = group->cautious;
  return to;
}

/* One parameter's work, with the scratch memory that the descriptor's `scratch` counts. */
typedef int pg__one_fn(const pg_increment_group *group, size_t i, float *memory);
/* `one` for each parameter of the group, all in the same `bytes` of scratch. */
int pg__each(const pg_increment_group *group, int64_t bytes, pg__one_fn *one);

/* Of parameter i, with M its first slot and X as large as that: M <- mu M + (1-mu) G; then also
 * X <- (1-mu) G + mu M with `nesterov`, M without. */
int pg__mean(const pg_increment_group *group, size_t i, double mu);
int pg__mean_direction(const pg_increment_group *group, size_t i, double mu, bool nesterov,
                       float *x);
/* The same of sums: M <- mu M + G;  X <- G + mu M or M, and its length in *norm. */
int pg__sum_direction(const pg_increment_group *group, size_t i, double mu, bool nesterov, float *x,
                      float *norm);
/* S of parameter i is `factor` x. */
int pg__deliver(const pg_increment_group *group, size_t i, double factor, const float *x);

/* c [m, n] = a b with a [m, k] and b [k, n], each of them given transposed if so. */
int pg__matmul(pg_context *ctx, const float *a, bool transpose_a, const float *b, bool transpose_b,
               int64_t m, int64_t k, int64_t n, float *c);
/* moment <- beta moment + (1-beta) g g^T, or g^T g unless `of_rows`; g [rows, columns]. */
int pg__second_moment(pg_context *ctx, const float *g, int64_t rows, int64_t columns, bool of_rows,
                      double beta, float *moment);

/* Rows, or with `by_column` columns, of x [group->rows, columns] over (norm op floor), where op is
 * PG_MAX or PG_ADD; of a part of the rows, the ranks add the squares of their columns' norms. A
 * floor below the smallest fp32 number counts as that. `norms` holds a number per row or column. */
int pg__normalise(const pg_increment_group *group, bool by_column, pg_binary_op op, double floor,
                  float *x, float *norms);

/* y = x - mean row over all rows of the parameter, of which x [group->rows, group->columns] may be
 * a part: then the ranks add their sums over rows. y may be x. */
int pg__center_rows(const pg_increment_group *group, const float *x, float *y);

/* x [group->rows, group->columns] times budget / D, where D is the exact diameter of all rows of
 * the parameter, of which x may be a part; as it is where D = 0. Waits. Costs what
 * pg_geometry_diameter does, and pg__budget_bytes for its own. */
int pg__use_budget(const pg_increment_group *group, double budget, float *x);
int64_t pg__budget_bytes(const pg_increment_group *group);

/* 1 - beta^n without cancellation; 1 for beta = 0. */
double pg__bias_correction(double beta, int64_t n);

#endif
