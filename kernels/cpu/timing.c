/* Time stamps, and the arithmetic peak. */
#include "gemm_dot.h"
#include "small_product.h"
#include <stdlib.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int PG_CPU(timestamp)(pg_queue *q, int64_t index) {
  if (index >= q->stamp_capacity) {
    int64_t capacity = pg_max64(1024, 2 * (index + 1));
    double *more = realloc(q->stamps, (size_t)capacity * sizeof *more);
    if (!more) return pg_refuse(q, "no memory for %lld time stamps", (long long)capacity);
    q->stamps = more;
    q->stamp_capacity = capacity;
  }
  q->stamps[index] = now();
  return 0;
}

int PG_CPU(elapsed)(pg_queue *q, int64_t count, double *seconds) {
  for (int64_t i = 0; i < count; i++) seconds[i] = q->stamps[i] - q->stamps[0];
  return 0;
}

/* Twelve sums in registers: more than latency times throughput of the multiply-add (four cycles,
 * two a cycle) on any of these CPUs. */
#define SUMS 12
#define ROUNDS 4096
#define SECONDS 0.01

static float rounds(float start) {
  pg_vector sum[SUMS], factor = PG_VECTOR_SET(0.5f), term = PG_VECTOR_SET(start), all = {0};
  float out[PG_WIDTH] = {0};
  for (int i = 0; i < SUMS; i++) sum[i] = PG_VECTOR_SET(start + (float)i);
  for (int r = 0; r < ROUNDS; r++)
    for (int i = 0; i < SUMS; i++) sum[i] = PG_VECTOR_FMA(sum[i], factor, term);
  for (int i = 0; i < SUMS; i++) all += sum[i];
  *(pg_loose_vector *)out = (pg_loose_vector)all;
  return out[0];
}

int PG_CPU(peak)(pg_queue *q, pg_dtype type, double *flops) {
  double calls = 0;
  volatile float sink = 0;
  *flops = 0;
  const bool dots = type == PG_BF16 && PG_CPU(gemm_dots)();
  if (type != PG_F32 && !dots) return 0;
#pragma omp parallel num_threads(q->threads) reduction(+ : calls)
  {
    float sum = 0;
    const double start = now();
    do {
      sum = dots ? PG_CPU(dot_rounds)(sum * 0x1p-20f) : rounds(sum * 0x1p-20f + 1);
      calls++;
    } while (now() - start < SECONDS);
#pragma omp critical
    sink = sink + sum;
  }
  *flops = calls * (dots ? PG_DOT_FLOPS : 2.0 * ROUNDS * SUMS * PG_WIDTH);
  return 0;
}
