/* Checks of a matrix that diagnostics make; the core touches no device memory. */
#ifndef PG_FINITE_H
#define PG_FINITE_H

#include "internal.h"

/* PG_ENONFINITE naming the first non-finite element of row `row` (0-based, as named); 0 when the
 * row has none. `what` names the matrix. t: fp32, 2-D. */
int pg__check_row_finite(const pg_tensor *t, int64_t row, const char *what);
/* The same for all rows, lowest first. */
int pg__check_finite(const pg_tensor *t, const char *what);
/* One pass over t, contiguous fp32: *sure when its length times |factor| is an fp32 number, so that
 * all elements times `factor` are finite. Otherwise some may not be. */
int pg__surely_finite(const pg_tensor *t, double factor, bool *sure);
/* PG_EINVAL unless t is an fp32 matrix of at least `rows` rows and one column. */
int pg__check_cloud(const pg_tensor *t, int64_t rows, const char *what);

#endif
