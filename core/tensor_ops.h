/* Arithmetic on tensors: what hooks, the REPL and optimizers written in Lua compute with. All on
 * fp32 tensors of up to two dimensions, with NumPy's broadcasting between [rows, columns],
 * [1, columns], [rows, 1], [columns] (as a row), and scalars. Shape errors name both shapes. */
#ifndef PG_TENSOR_OPS_H
#define PG_TENSOR_OPS_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Operations by name: binary "add" "sub" "mul" "div" "minimum" "maximum" "pow" "lt" "le" "gt" "ge"
 * "eq" "ne" "masked" (a where b is not 0, else -0); unary "neg" "abs" "sqrt" "square" "exp" "log"
 * "sign" "reciprocal" "tanh" "isfinite" "floor" "ceil" "round" (halves to even); reductions
 * "sum" "mean" "max" "min" "norm" "argmax" "argmin". */
/* out NULL: a new tensor in *result; else written in place (must have the broadcast shape). */
int pg_tensor_binary(const char *op, const pg_tensor *a, const pg_tensor *b, pg_tensor *out,
                     pg_tensor **result);
int pg_tensor_scalar(const char *op, const pg_tensor *a, double scalar, bool reversed,
                     pg_tensor *out, pg_tensor **result);
int pg_tensor_unary(const char *op, const pg_tensor *a, pg_tensor *out, pg_tensor **result);
/* x <- (1-w) x + w y; y broadcasts. */
int pg_tensor_lerp(pg_tensor *x, const pg_tensor *y, double w);
/* axis 0: over rows, giving [columns]; 1: within rows, giving [rows]; -1: all, giving []. A vector
 * has only -1. Sum and norm of nothing are 0, the others PG_EINVAL. */
int pg_tensor_reduce(const char *op, const pg_tensor *a, int axis, pg_tensor **result);
/* a [m,k] b [k,n] -> [m,n], either transposed as a view. A vector is a row on the left, a column on
 * the right, and its dimension is dropped from the result. */
int pg_tensor_matmul(const pg_tensor *a, const pg_tensor *b, pg_tensor **result);
/* The value is rounded to fp32; a denormal is taken as zero, as in all element-wise kernels. */
int pg_tensor_fill(pg_tensor *t, double value);
/* x scaled or divided row by row: v has [rows] elements. */
int pg_tensor_rows_op(const char *op, const pg_tensor *a, const pg_tensor *v, pg_tensor *out,
                      pg_tensor **result);

/* The first k of each row (of a vector) in order, smallest or largest first; the earlier of equals
 * comes first, NaN counts as the largest. Two new tensors: values, and columns from 0 as fp32.
 * Through host memory. */
int pg_tensor_sort(const pg_tensor *a, int64_t k, bool descending, pg_tensor **values,
                   pg_tensor **indices);
/* Rows (of a vector: elements) rows[0 … n), counted from 0, as a new tensor. */
int pg_tensor_gather_rows(const pg_tensor *a, const int32_t *rows, int64_t n, pg_tensor **result);
/* A new contiguous tensor of the same numbers in fp32, through host memory unless they are that. */
int pg_tensor_float(const pg_tensor *t, pg_tensor **result);
/* Element i, in row-major order, from random number first + i of (seed, stream): uniform in [a, b)
 * on a grid of (b - a) 2^-24, or normal with mean a and deviation b from pg_normals. Made on the
 * host, alike everywhere. */
int pg_tensor_random(pg_tensor *t, bool normal, uint64_t seed, uint64_t stream, uint64_t first,
                     double a, double b);

#ifdef __cplusplus
}
#endif
#endif
