/* Shared by the optimizers: the registry's list, and views for composing kernels. */
#ifndef PG_OPTIMIZERS_COMPOSE_H
#define PG_OPTIMIZERS_COMPOSE_H

#include "../internal.h"
#include "../optimizer.h"

/* All registered descriptors, in order. */
extern const pg_optimizer *const pg__optimizers[];
extern const size_t pg__optimizer_count;

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
/* One number for all. */
static inline pg_view pg__constant_view(float *data) {
  return (pg_view){data, 0, 0};
}
/* The diagonal of [n, n], as n rows of one column. */
static inline pg_view pg__diagonal_view(float *data, int64_t n) {
  return (pg_view){data, n + 1, 0};
}

/* y = x - mean row over all rows of the parameter, of which x [group->rows, group->columns] may be
 * a part: then the ranks add their sums over rows. y may be x. */
int pg__center_rows(const pg_increment_group *group, const float *x, float *y);

/* 1 - beta^n without cancellation; 1 for beta = 0. */
double pg__bias_correction(double beta, int64_t n);

#endif
