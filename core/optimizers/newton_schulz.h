/* Polar factors by Newton-Schulz steps, for the optimizers that orthogonalise. One step takes
 *   A = X X^T,  X <- a X + (b A + c A A) X,
 * or, with rows > columns, A = X^T X and X <- a X + X (b A + c A A), which is the transposed
 * iteration without a transposition. It takes each singular value x to a x + b x^3 + c x^5. */
#ifndef PG_OPTIMIZERS_NEWTON_SCHULZ_H
#define PG_OPTIMIZERS_NEWTON_SCHULZ_H

#include "compose.h"

/* `count` matrices at work, each buffer [count][...] contiguous and of `type`. */
typedef struct pg__polar {
  int64_t count, rows, columns, small; /* small = min(rows, columns) */
  pg_dtype type;
  void *a, *p;      /* [count, small, small] */
  float *direction; /* [count, rows, columns] in fp32: x itself, or what it is rounded from */
  void *x, *next;   /* [count, rows, columns] */
  float *norm;      /* [count], the directions' where `measured` */
  bool measured;
} pg__polar;

/* Of the k-th step, from 0; past the last of a set the last repeats. */
typedef enum pg__coefficients {
  PG__QUINTIC,       /* Jordan et al. 2024 */
  PG__POLAR_EXPRESS, /* Amsel et al. 2025; expects the norm with 2 % to spare */
  PG__DION,          /* Ahn et al. 2025 */
  PG__MODULA,        /* Bernstein et al. 2025 */
  PG__GRAM           /* Lau and Su 2026 */
} pg__coefficients;

/* Bytes that `count` matrices take, in fp32; in bf16 they take no more. */
int64_t pg__polar_bytes(int64_t count, int64_t rows, int64_t columns);
pg__polar pg__polar_in(void *memory, int64_t capacity, int64_t rows, int64_t columns,
                       pg_dtype type);
/* x <- polar factor of `direction`, by `steps` steps from direction / (room ||.||_F + eps), where
 * room is 1.02 for Polar Express and 1 else. x and next may have changed places. */
int pg__polar_factor(pg_context *ctx, pg__polar *c, pg__coefficients set, int steps, double eps);

#endif
