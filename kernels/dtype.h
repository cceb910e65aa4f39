/* Element types of device memory. Storage of weights, gradients and slots is F32 throughout;
 * BF16 is for compute copies, I32 for tokens, F64 for sums that decide. */
#ifndef PG_DTYPE_H
#define PG_DTYPE_H

typedef enum pg_dtype { PG_F32, PG_BF16, PG_I32, PG_F64 } pg_dtype;

#endif
