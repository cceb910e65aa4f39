/* Adding an increment to a parameter, decoupled weight decay first, and conversion of types. */
#include "bf16.h"
#include <omp.h>

/* w <- keep w + s: one rounding of the product, one of the sum. */
int PG_CPU(apply)(pg_queue *q, double keep, const float *s, int64_t n, float *w, uint16_t *copy) {
  float k = (float)keep;
#pragma omp parallel num_threads(pg_team(q, n))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t from = begin; from < end; from += PG_RUN) {
      int64_t to = pg_min64(end, from + PG_RUN);
#pragma omp simd
      for (int64_t i = from; i < to; i++) w[i] = k * w[i] + s[i];
      if (copy) pg_narrow(w + from, to - from, copy + from);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

int PG_CPU(convert)(pg_queue *q, pg_dtype from_type, const void *from, pg_dtype to_type, void *to,
                    int64_t n) {
  bool known =
      (from_type == PG_F32 || from_type == PG_BF16) && (to_type == PG_F32 || to_type == PG_BF16);
  if (!known) return pg_refuse(q, "conversion is between F32 and BF16");
  if (from_type == to_type) return PG_CPU(copy)(q, to, from, (size_t)n * pg_type_size(to_type));
#pragma omp parallel num_threads(pg_team(q, n))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    if (to_type == PG_BF16)
      pg_narrow((const float *)from + begin, end - begin, (uint16_t *)to + begin);
    else
      pg_widen((const uint16_t *)from + begin, end - begin, (float *)to + begin);
  }
  return 0;
}
