/* Measurements for `perigee bench`: what the machine can do, and each kernel at the sizes of a
 * model. Not installed. */
#ifndef PG_BENCH_H
#define PG_BENCH_H

#include "internal.h"
#include "model.h"

/* The best of a few repeats. A copy counts bytes read plus written. Arithmetic is that of a loop of
 * multiply-adds in registers where the backend has one, else (product > 0) that of a square matrix
 * product of so many rows, operands of the type, fp32 or bf16 results as the type is. */
typedef struct pg_peak {
  double bytes_per_second;
  int64_t copy_bytes;
  double flops_per_second[2]; /* PG_F32, PG_BF16 */
  int64_t product[2];
} pg_peak;
int pg_bench_peak(pg_context *ctx, pg_peak *out);

/* Sizes of a micro-batch of `batch` sequences, and the compute type. */
typedef struct pg_bench_sizes {
  pg_model_config config; /* resolved */
  int64_t batch;
  pg_dtype compute;
} pg_bench_sizes;

typedef struct pg_kernel_time {
  const char *operation;
  char shape[80];
  pg_dtype type;  /* whose arithmetic bounds it */
  double seconds; /* median */
  int repeats;
  double bytes, flops; /* kernels/cost.h */
} pg_kernel_time;
/* Time all kernels, in a fixed order: warm-up, then repeats for about 0.2 s, at least three; before
 * each, memory larger than the last-level cache is written. The caller frees *out. */
int pg_bench_kernels(pg_context *ctx, const pg_bench_sizes *sizes, pg_kernel_time **out,
                     size_t *count);

/* ---- shared by bench.c and bench_kernels.c ------------------------------------------------ */
#define PG__BENCH_OPERANDS 16

typedef struct pg__bench {
  pg_context *context;
  const pg_bench_sizes *sizes;
  pg_kernel_time *result;
  int64_t n;  /* positions */
  int status; /* of the first operand that could not be made */
  struct {
    void *memory;
    size_t bytes;
  } operands[PG__BENCH_OPERANDS];
  int operand_count;
  size_t operand_bytes;
  void *sweep;                        /* written before each repeat */
  size_t sweep_capacity, sweep_bytes; /* it is shared by all cases; as much as this one needs */
  int round;                          /* 0: warm-up */
  double started;
} pg__bench;

/* Operands live until the case is over; NULL, and b->status set, when one cannot be made. Normal
 * numbers of standard deviation `scale`; zeros; ids below `limit`, small ones more often. */
void *pg__bench_normals(pg__bench *b, pg_dtype type, int64_t count, double scale);
void *pg__bench_zeros(pg__bench *b, size_t bytes);
int32_t *pg__bench_ids(pg__bench *b, int64_t count, int64_t limit);
/* The loop around the one launch of a case: while (pg__bench_next(b, &status)) PG_LAUNCH(...). */
bool pg__bench_next(pg__bench *b, int *status);

typedef struct pg__bench_case {
  int (*run)(pg__bench *b);
} pg__bench_case;
extern const pg__bench_case pg__bench_cases[];
extern const size_t pg__bench_case_count;

#endif
