/* Gram matrices W^T W of tall matrices and their Cholesky factors, in fp64 on the host (BLAS,
 * LAPACK). All square matrices here are by rows. */
#ifndef PG_GRAM_H
#define PG_GRAM_H

#include "internal.h"

/* gram [columns, columns] of t, fp32 [rows, columns] with contiguous rows; or with of_rows W W^T
 * [rows, rows], for which all of t is widened at once. Polls cancellation. */
int pg__gram(const pg_tensor *t, bool of_rows, double *gram);
/* Replace the lower triangle of gram [n, n] by L with L L^T = gram. PG_EINVAL where the columns
 * that it is of are linearly dependent to rounding; `what` has them. *condition, unless NULL: an
 * estimate (LAPACK's dpocon) of ||gram||_1 ||gram^-1||_1. */
int pg__gram_factor(pg_context *ctx, double *gram, int64_t n, const char *what, double *condition);
/* Rows x_i of x [m, n] become L^-1 x_i. */
void pg__gram_divide(const pg_context *ctx, const double *factor, int64_t n, double *x, int64_t m);
/* gram^-1 x, x [n, m] in place. */
void pg__gram_solve(const pg_context *ctx, const double *factor, int64_t n, double *x, int64_t m);
/* Replace the m <= n independent rows of x [m, n] by orthonormal ones that span the same. */
int pg__orthonormal_rows(pg_context *ctx, double *x, int64_t m, int64_t n);
/* Eigenvalues w [n] of the symmetric a [n, n], increasing; its eigenvectors as rows replace a, or
 * anything. PG_ENOMEM, or LAPACK's info > 0 where dsyevd gave up: no message then. */
int pg__eigen(pg_context *ctx, bool vectors, double *a, int64_t n, double *w);

#endif
