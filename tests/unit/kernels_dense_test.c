/* Level selection, memory, dense products and the embedding. */
#include "kernels_unit.h"
#include <omp.h>
#include <time.h>

static double cpu_seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A queue of one thread computes on the calling thread alone, also inside OpenBLAS, and the host's
 * own OpenMP setting is left as it was. */
TEST(one_thread_is_one_thread) {
  int usual = omp_get_max_threads();
  omp_set_num_threads(3);
  unit_backend(0);
  int64_t n = 800;
  float *a = unit_normals(n * n, 1), *c = unit_poisoned(n * n);
  pg_gemm g = {false, true, n, n,      n,      1,      0, a, a, c, NULL,
               n,     n,    n, PG_F32, PG_F32, PG_F32, 1, 0, 0, 0, false};
  pg_farthest f;
  double process = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  double own = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < 3; i++) KERNEL(gemm, &g);
  KERNEL(diameter, a, n, n, NULL, &f);
  own = cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - own;
  process = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - process;
  /* Shared with two others, the calling thread would do about a third of the work. */
  CHECK(own >= 0.8 * process, "%.4f s of %.4f s on the calling thread", own, process);
  CHECK(omp_get_max_threads() == 3, "the host's setting became %d", omp_get_max_threads());
  omp_set_num_threads(usual);
  free(a), free(c);
}

TEST(levels) {
  CHECK(pg_cpu_kernels("base") == &pg_cpu_base_kernels, "base always runs");
  CHECK(pg_cpu_kernels("sse9") == NULL, "an unknown level");
  CHECK(strcmp(pg_cpu_kernels("base")->name, "cpu") == 0, "the backend's name");
  setenv("PG_CPU", "base", 1);
  CHECK(pg_cpu_kernels(NULL) == &pg_cpu_base_kernels, "PG_CPU=base");
  setenv("PG_CPU", "nonsense", 1);
  CHECK(pg_cpu_kernels(NULL) == NULL, "PG_CPU=nonsense");
  CHECK(pg_cpu_kernels("base") == &pg_cpu_base_kernels, "an argument goes before PG_CPU");
  setenv("PG_CPU", "", 1);
  CHECK(pg_cpu_kernels(NULL) != NULL, "PG_CPU empty is no choice");
  unsetenv("PG_CPU");
  CHECK(pg_cpu_kernels(NULL) != NULL, "no choice");
}

TEST(memory) {
  int64_t sizes[] = {0, 1, 1000, (1 << 20) + 12, 9 << 20};
  for (int s = 0; s < 5; s++) {
    size_t bytes = (size_t)sizes[s];
    unsigned char *host = malloc(bytes + 1), *back = calloc(bytes + 1, 1);
    void *a = NULL, *b = NULL;
    for (size_t i = 0; i < bytes; i++) host[i] = (unsigned char)(i * 131 + i / 7);
    KERNEL(alloc, bytes, &a);
    KERNEL(alloc, bytes, &b);
    CHECK(a && (uintptr_t)a % 64 == 0, "%p is not aligned", a);
    KERNEL(upload, a, host, bytes);
    KERNEL(copy, b, a, bytes);
    KERNEL(download, back, b, bytes);
    CHECK(memcmp(host, back, bytes) == 0, "%zu bytes differ after a round trip", bytes);
    KERNEL(zero, b, bytes);
    KERNEL(download, back, b, bytes);
    int64_t rest = 0;
    for (size_t i = 0; i < bytes; i++) rest += back[i];
    CHECK(rest == 0, "%zu bytes are not zero", bytes);
    k->release(q, a);
    k->release(q, b);
    free(host);
    free(back);
  }
  void *huge = &huge;
  CHECK(k->alloc(q, SIZE_MAX - 8, &huge) == -1 && !huge, "an impossible allocation");
  CHECK(strstr(k->message(q), "no memory"), "message: %s", k->message(q));
  k->release(q, NULL);
}

/* |error| <= gamma_{k+3} (|alpha| sum |a||b| + |beta d|), whatever the order of summation. With
 * `symmetric`, b is a and the addend is made symmetric. */
static void check_product(bool ta, bool tb, int64_t m, int64_t n, int64_t kk, float alpha,
                          float beta, int64_t batch, int64_t pad, bool symmetric) {
  int64_t lda = (ta ? m : kk) + pad, ldb = (tb ? kk : n) + pad, ldc = n + pad;
  int64_t na = (ta ? kk : m) * lda, nb = (tb ? n : kk) * ldb, nc = m * ldc;
  int64_t entries = batch ? batch : 1;
  float *a = unit_normals(na * entries, 1), *b = unit_normals(nb * entries, 1);
  float *c = beta == 0 ? unit_poisoned(nc * entries) : unit_normals(nc * entries, 1);
  if (symmetric) {
    memcpy(b, a, (size_t)(na * entries) * sizeof *a);
    for (int64_t e = 0; e < entries && beta != 0; e++)
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) c[e * nc + j * ldc + i] = c[e * nc + i * ldc + j];
  }
  float *before = unit_clone(c, nc * entries);
  pg_gemm g = {ta,  tb,  m,   n,      kk,     alpha,  beta,  a,  b,  c,  NULL,
               lda, ldb, ldc, PG_F32, PG_F32, PG_F32, batch, na, nb, nc, symmetric};
  KERNEL(gemm, &g);
  double worst = 0, limit = ((double)kk + 3) * UNIT_ULP;
  int outside = 0;
  for (int64_t e = 0; e < entries; e++)
    for (int64_t i = 0; i < m; i++) {
      for (int64_t j = 0; j < n; j++) {
        double sum = 0, size = 0;
        for (int64_t l = 0; l < kk; l++) {
          double x = a[e * na + (ta ? l * lda + i : i * lda + l)];
          double y = b[e * nb + (tb ? j * ldb + l : l * ldb + j)];
          sum += x * y;
          size += fabs(x * y);
        }
        int64_t at = e * nc + i * ldc + j;
        double old = beta == 0 ? 0 : beta * (double)before[at];
        double error = fabs((double)c[at] - (alpha * sum + old));
        double scaled = error / (fabs(alpha) * size + fabs(old) + 1e-300);
        if (!(scaled <= worst)) worst = scaled;
      }
      outside += memcmp(c + e * nc + i * ldc + n, before + e * nc + i * ldc + n,
                        (size_t)pad * sizeof *c) != 0;
    }
  CHECK(worst <= limit, "%d%d m=%lld n=%lld k=%lld: error %.3g above %.3g", ta, tb, (long long)m,
        (long long)n, (long long)kk, worst, limit);
  CHECK(!outside, "%d rows written past n", outside);
  memcpy(c, before, (size_t)(nc * entries) * sizeof *c);
  float *again = unit_clone(before, nc * entries);
  KERNEL(gemm, &g);
  g.c = again;
  KERNEL(gemm, &g);
  CHECK(unit_same_bits(c, again, nc * entries), "two runs differ");
  /* The addend somewhere else, and where it is C by name. */
  float *apart = unit_clone(before, nc * entries);
  for (int64_t i = 0; i < nc * entries; i++)
    if (i % ldc < n) apart[i] = NAN;
  memcpy(again, before, (size_t)(nc * entries) * sizeof *c);
  g.addend = again;
  KERNEL(gemm, &g);
  g.c = apart, g.addend = before;
  KERNEL(gemm, &g);
  CHECK(unit_same_bits(c, again, nc * entries) && unit_same_bits(c, apart, nc * entries),
        "an addend elsewhere");
  free(a), free(b), free(c), free(before), free(again), free(apart);
}

static void check_gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t kk, float alpha, float beta,
                       int64_t batch, int64_t pad) {
  check_product(ta, tb, m, n, kk, alpha, beta, batch, pad, false);
}

TEST(gemm) {
  unit_seed(11);
  int64_t sizes[][3] = {{1, 1, 1},   {2, 3, 5},    {37, 41, 29}, {1, 257, 64},
                        {64, 1, 33}, {129, 65, 7}, {5, 300, 17}, {200, 150, 130}};
  for (int s = 0; s < 8; s++)
    for (int t = 0; t < 4; t++) {
      check_gemm(t & 1, t >> 1, sizes[s][0], sizes[s][1], sizes[s][2], 1, 0, 0, 0);
      check_gemm(t & 1, t >> 1, sizes[s][0], sizes[s][1], sizes[s][2], -0.5f, 1.5f, 0, 3);
    }
  check_gemm(false, true, 19, 23, 18, 2, 0, 5, 0);
  check_gemm(true, false, 70, 23, 90, 1, 1, 1, 2);
}

/* Grids of blocks that do not divide the matrix, with more threads than some sides have rows. */
/* Sides within and beyond the blocks of the mirror; enough entries for a thread each, and one. */
TEST(gemm_symmetric) {
  unit_seed(4);
  for (int t = 0; t < 2; t++)
    for (int batch = 1; batch < 6; batch += 4) {
      check_product(t, !t, 67, 67, 29, 1, 0, batch, 3, true);
      check_product(t, !t, 33, 33, 100, -0.5f, 1.5f, batch, 0, true);
      check_product(t, !t, 1, 1, 7, 2, 1, batch, 1, true);
    }
}

TEST(gemm_many_threads) {
  pg_queue *usual = q;
  unit_seed(13);
  for (int threads = 3; threads <= 8; threads++) {
    pg_queue_options options = {.threads = threads};
    char why[64];
    if (k->queue_new(&options, &q, why, sizeof why) < 0) abort();
    check_gemm(false, true, 100, 37, 64, 1, 0, 0, 0);
    check_gemm(true, false, 3, 2001, 40, 1, 1, 0, 1);
    check_gemm(false, false, 2001, 3, 40, 1, 0, 0, 0);
    check_gemm(false, true, 1, 500, 300, 1, 0, 0, 0);
    check_gemm(false, true, 40, 40, 40, 1, 0, 7, 0);
    k->queue_free(q);
  }
  q = usual;
}

TEST(gemm_by_hand) {
  float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, -1, 2, 1, 1}, c[4] = {NAN, NAN, NAN, NAN};
  pg_gemm g = {false, false, 2, 2,      3,      1,      0, a, b, c, NULL,
               3,     2,     2, PG_F32, PG_F32, PG_F32, 1, 0, 0, 0, false};
  KERNEL(gemm, &g);
  CHECK(c[0] == 2 && c[1] == 7 && c[2] == 5 && c[3] == 16, "%g %g %g %g", c[0], c[1], c[2], c[3]);
  g.k = 0;
  KERNEL(gemm, &g);
  CHECK(c[0] == 0 && c[3] == 0, "k = 0 must give zeros");
  const float d[] = {2, 4, 6, 8};
  g.addend = d, g.beta = 0.5f;
  KERNEL(gemm, &g);
  CHECK(c[0] == 1 && c[1] == 2 && c[2] == 3 && c[3] == 4, "k = 0 must give beta D");
  g.type_b = PG_BF16;
  CHECK(k->gemm(q, &g) == -1 && strstr(k->message(q), "BF16"), "mixed operands are refused");
}

TEST(embedding) {
  unit_seed(12);
  int64_t shapes[][3] = {{1, 1, 1}, {7, 5, 3}, {300, 31, 18}, {2000, 50, 64}};
  for (int s = 0; s < 4; s++) {
    int64_t n = shapes[s][0], vocab = shapes[s][1], d = shapes[s][2];
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(unit_uniform() * (double)vocab);
    tokens[0] = (int32_t)vocab - 1;
    float *w = unit_normals(vocab * d, 1), *out = unit_poisoned(n * d);
    float *dout = unit_normals(n * d, 1), *dw = unit_normals(vocab * d, 1);
    float *want = unit_clone(dw, vocab * d);
    KERNEL(embedding_forward, PG_F32, tokens, n, w, d, out);
    int wrong = 0;
    for (int64_t i = 0; i < n * d; i++) wrong += out[i] != w[tokens[i / d] * d + i % d];
    CHECK(!wrong, "%d elements", wrong);
    /* Each row in increasing position: exactly this loop. */
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < d; j++) want[tokens[i] * d + j] += dout[i * d + j];
    KERNEL(embedding_backward, PG_F32, tokens, n, dout, d, vocab, dw);
    CHECK(unit_same_bits(dw, want, vocab * d), "the order of the sum");
    free(tokens), free(w), free(out), free(dout), free(dw), free(want);
  }
}

int main(void) {
  RUN(one_thread_is_one_thread);
  RUN(levels);
  FOR_EACH_BACKEND {
    RUN(memory);
    RUN(gemm);
    RUN(gemm_symmetric);
    RUN(gemm_many_threads);
    RUN(gemm_by_hand);
    RUN(embedding);
  }
  return unit_kernels_report();
}
