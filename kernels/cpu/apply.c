/* Scaled matrices to their targets, and conversion of types. */
#include "target.h"

int PG_CPU(apply)(pg_queue *q, double factor, pg_dtype type, const void *x, int64_t n,
                  int64_t count, const pg_target *to) {
  const float by = (float)factor;
  if (type != PG_F32 && type != PG_BF16) return pg_refuse(q, "increments come from F32 or BF16");
#pragma omp parallel num_threads(pg_team(q, n *count))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    int64_t begin = pg_part(n, t, parts), end = pg_part(n, t + 1, parts);
    float wide[PG_RUN], scratch[PG_RUN];
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t k = 0; k < count; k++)
      for (int64_t i = begin; i < end; i += PG_RUN) {
        int64_t run = pg_min64(end - i, PG_RUN);
        const float *from = pg_run_in(type, x, k * n + i, run, wide);
        float *s = pg_target_run(&to[k], i, scratch);
#pragma omp simd
        for (int64_t j = 0; j < run; j++) s[j] = by * from[j];
        pg_target_apply(&to[k], i, run, s);
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
