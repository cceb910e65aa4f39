/* Products on the device: transposes, leading dimensions, batches, alpha and beta, all types. */
#include "cuda_unit.h"

typedef struct shape {
  int64_t m, n, k, pad, batch;
} shape;

static void check_product(const shape *s, int transposes, float alpha, float beta, bool apart,
                          pg_dtype in, pg_dtype out) {
  pg_gemm g = {.transpose_a = transposes & 1,
               .transpose_b = (transposes & 2) != 0,
               .m = s->m,
               .n = s->n,
               .k = s->k,
               .alpha = alpha,
               .beta = beta,
               .type_a = in,
               .type_b = in,
               .type_c = out,
               .batch = s->batch};
  int64_t count = s->batch ? s->batch : 1;
  g.lda = (g.transpose_a ? s->m : s->k) + s->pad;
  g.ldb = (g.transpose_b ? s->k : s->n) + s->pad;
  g.ldc = s->n + s->pad;
  g.stride_a = (g.transpose_a ? s->k : s->m) * g.lda + 8 * s->pad;
  g.stride_b = (g.transpose_b ? s->n : s->k) * g.ldb;
  g.stride_c = s->m * g.ldc;
  twin a = normals(in, count * g.stride_a, 1), b = normals(in, count * g.stride_b, 1);
  /* beta = 0 never reads C. Between the rows of C is NaN that must stay. */
  twin c = beta == 0 ? poisoned(out, count * g.stride_c) : normals(out, count * g.stride_c, 1);
  twin result = poisoned(out, count * s->m * s->n), c2 = c;
  if (apart) c2 = beta == 0 ? poisoned(out, c.n) : normals(out, c.n, 1);
  g.a = a.at[CPU], g.b = b.at[CPU], g.c = c.at[CPU], g.addend = apart ? c2.at[CPU] : NULL;
  ON(CPU, gemm, &g);
  g.a = a.at[GPU], g.b = b.at[GPU], g.c = c.at[GPU], g.addend = apart ? c2.at[GPU] : NULL;
  ON(GPU, gemm, &g);
  size_t size = type_size(out), row = (size_t)s->n * size;
  char *got = from_gpu(&c), *packed = malloc(twin_bytes(&result) + 1);
  int64_t changed = 0;
  for (int64_t i = 0; i < count * s->m; i++) {
    memcpy(packed + (size_t)i * row, got + (size_t)(i * g.ldc) * size, row);
    memcpy((char *)result.at[CPU] + (size_t)i * row, (char *)c.at[CPU] + (size_t)(i * g.ldc) * size,
           row);
    changed +=
        memcmp(got + (size_t)(i * g.ldc + s->n) * size,
               (char *)c.at[CPU] + (size_t)(i * g.ldc + s->n) * size, (size_t)s->pad * size) != 0;
  }
  CHECK(!changed, "%lld rows changed past their end", (long long)changed);
  ON(GPU, upload, result.at[GPU], packed, twin_bytes(&result));
  char name[96];
  snprintf(name, sizeof name,
           "[%lld,%lld,%lld] x%lld, transposes %d, beta %g of %s, bf16 operands %d",
           (long long)s->m, (long long)s->n, (long long)s->k, (long long)count, transposes,
           (double)beta, apart ? "another" : "C", in == PG_BF16);
  CHECK_AGREE(name, &result);
  free(got), free(packed);
  drop_twins();
}

static void check_types(const shape *s, int transposes, float alpha, float beta) {
  for (int apart = 0; apart < 2; apart++) {
    check_product(s, transposes, alpha, beta, apart, PG_F32, PG_F32);
    check_product(s, transposes, alpha, beta, apart, PG_BF16, PG_F32);
    check_product(s, transposes, alpha, beta, apart, PG_BF16, PG_BF16);
  }
}

TEST(shapes_and_transposes) {
  unit_seed(61);
  shape shapes[] = {{1, 1, 1, 0, 0},    {37, 18, 64, 0, 0}, {1, 97, 72, 0, 0},
                    {64, 1, 128, 0, 0}, {33, 35, 37, 3, 0}, {16, 24, 32, 8, 1}};
  for (int c = 0; c < 6; c++)
    for (int t = 0; t < 4; t++) {
      check_types(&shapes[c], t, 1, 0);
      check_types(&shapes[c], t, 0.5f, 1);
      check_types(&shapes[c], t, -2, 0.25f);
    }
}

TEST(batches) {
  unit_seed(62);
  for (int t = 0; t < 4; t++) {
    check_types(&(shape){5, 7, 9, 0, 3}, t, 1, 0);
    check_types(&(shape){8, 16, 24, 8, 4}, t, 1, 1);
  }
}

TEST(vocabulary) {
  unit_seed(63);
  check_types(&(shape){3, 50257, 18, 0, 0}, 2, 1, 0);
  check_types(&(shape){18, 37, 1023, 0, 0}, 1, 1, 1);
}

/* No rows, no columns. */
TEST(empty) {
  unit_seed(64);
  for (int t = 0; t < 4; t++) {
    check_types(&(shape){0, 5, 3, 0, 0}, t, 1, 0);
    check_types(&(shape){5, 0, 3, 0, 0}, t, 1, 0);
  }
}

/* Nothing to sum leaves beta D, in C or elsewhere. */
TEST(no_depth) {
  float c[] = {NAN, NAN, NAN, NAN, NAN, NAN}, d[] = {2, 4, -6, 8, 10, 12};
  twin tc = twin_of(PG_F32, 6, c), td = twin_of(PG_F32, 6, d);
  pg_gemm g = {.m = 2, .n = 3, .alpha = 1, .beta = 0.5f, .lda = 1, .ldb = 3, .ldc = 3};
  for (int side = 0; side < 2; side++) {
    g.c = tc.at[side], g.addend = td.at[side], g.a = g.b = td.at[side];
    ON(side, gemm, &g);
    g.c = td.at[side], g.addend = NULL;
    ON(side, gemm, &g);
  }
  CHECK_SAME("elsewhere", &tc);
  CHECK_SAME("in place", &td);
  CHECK(((float *)tc.at[CPU])[2] == -3, "%g", (double)((float *)tc.at[CPU])[2]);
  drop_twins();
}

/* A diverged run is to show: NaN and infinity go through. */
TEST(not_finite) {
  float a[] = {1, NAN, 2, 3, INFINITY, 1}, b[] = {1, 0, 1, 1, 0, 1};
  twin ta = twin_of(PG_F32, 6, a), tb = twin_of(PG_F32, 6, b), tc = poisoned(PG_F32, 9);
  pg_gemm g = {.m = 3, .n = 3, .k = 2, .alpha = 1, .lda = 2, .ldb = 3, .ldc = 3};
  g.a = ta.at[GPU], g.b = tb.at[GPU], g.c = tc.at[GPU];
  ON(GPU, gemm, &g);
  float *c = from_gpu(&tc);
  CHECK(isnan(c[0]) && c[3] == 5 && !isfinite(c[6]), "%g %g %g", (double)c[0], (double)c[3],
        (double)c[6]);
  free(c);
  drop_twins();
}

int main(void) {
  open_sides();
  RUN(shapes_and_transposes);
  RUN(batches);
  RUN(vocabulary);
  RUN(empty);
  RUN(no_depth);
  RUN(not_finite);
  return close_sides();
}
