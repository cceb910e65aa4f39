/* Embedding, normalisation, rotary positions, the gated unit, the loss and the range of logits on
 * the device, in both compute types. */
#include "cuda_unit.h"

#define FOR_EACH_TYPE(t) for (pg_dtype t = PG_F32; t <= PG_BF16; t++)

TEST(embedding) {
  unit_seed(41);
  int64_t shapes[][3] = {{1, 2, 97},     {37, 18, 97},  {37, 64, 50257}, {1023, 37, 97},
                         {300, 128, 97}, {100, 130, 5}, {1023, 2, 1}};
  for (int c = 0; c < 7; c++) FOR_EACH_TYPE(type) {
      int64_t n = shapes[c][0], d = shapes[c][1], vocab = shapes[c][2];
      twin tokens = tokens_below(n, vocab), w = normals(type, vocab * d, 1);
      twin out = poisoned(type, n * d), dout = normals(type, n * d, 1);
      twin dw = normals(PG_F32, vocab * d, 1), again = clone(&dw);
      BOTH(embedding_forward, type, P(tokens), n, P(w), d, P(out));
      CHECK_SAME("embedding forward", &out);
      BOTH(embedding_backward, type, P(tokens), n, P(dout), d, vocab, P(dw));
      CHECK_AGREE("embedding backward", &dw);
      /* Increasing i, so the same bits in every run. */
      ON(GPU, embedding_backward, type, P(tokens), n, P(dout), d, vocab, P(again));
      void *a = from_gpu(&dw), *b = from_gpu(&again);
      CHECK(!memcmp(a, b, twin_bytes(&dw)), "two runs differ");
      free(a), free(b);
      drop_twins();
    }
}

TEST(rmsnorm) {
  unit_seed(42);
  int64_t shapes[][2] = {{1, 1},  {1, 64},   {3, 2},    {37, 18},
                         {5, 72}, {33, 128}, {4, 1023}, {3, 4096}};
  for (int c = 0; c < 8; c++) FOR_EACH_TYPE(type) {
      int64_t n = shapes[c][0], d = shapes[c][1];
      twin x = normals(type, n * d, 2), y = poisoned(type, n * d), rstd = poisoned(PG_F32, n);
      twin in_place = clone(&x), dy = normals(type, n * d, 1), dx = poisoned(type, n * d);
      twin sum = normals(type, n * d, 1);
      BOTH(rmsnorm_forward, type, P(x), n, d, 1e-6f, P(y), P(rstd));
      CHECK_AGREE("rmsnorm", &y);
      CHECK_AGREE("rstd", &rstd);
      BOTH(rmsnorm_forward, type, P(in_place), n, d, 1e-6f, P(in_place), NULL);
      CHECK_AGREE("rmsnorm in place, no rstd", &in_place);
      /* For d = 1 the gradient cancels to eps: nothing to compare. */
      if (d == 1) dx = y;
      if (d > 1) BOTH(rmsnorm_backward, type, P(dy), P(x), P(rstd), n, d, false, P(dx));
      CHECK_AGREE("rmsnorm backward", &dx);
      if (d > 1) BOTH(rmsnorm_backward, type, P(dy), P(x), P(rstd), n, d, true, P(sum));
      CHECK_AGREE("rmsnorm backward, added", &sum);
      if (d > 1) BOTH(rmsnorm_backward, type, P(dy), P(x), P(rstd), n, d, false, P(dy));
      CHECK_AGREE("rmsnorm backward in place", &dy);
      drop_twins();
    }
}

TEST(qk_norm_rope) {
  unit_seed(43);
  int64_t shapes[][4] = {{1, 1, 1, 2},   {2, 37, 3, 18}, {2, 5, 2, 64},
                         {1, 37, 2, 72}, {1, 9, 1, 128}, {1, 1023, 1, 2}};
  for (int c = 0; c < 6; c++) FOR_EACH_TYPE(type) {
      int64_t batch = shapes[c][0], time = shapes[c][1], heads = shapes[c][2], hd = shapes[c][3];
      int64_t n = batch * time * heads * hd, half = hd / 2;
      float *table = malloc((size_t)(2 * time * half) * sizeof *table);
      for (int64_t i = 0; i < time * half; i++) {
        double angle = (double)(i / half) * pow(10000, -(double)(i % half) / (double)half);
        table[i] = (float)cos(angle);
        table[time * half + i] = (float)sin(angle);
      }
      twin cosine = twin_of(PG_F32, time * half, table);
      twin sine = twin_of(PG_F32, time * half, table + time * half);
      twin x = normals(type, n, 2), y = poisoned(type, n), dy = normals(type, n, 1);
      twin rstd = poisoned(PG_F32, batch * time * heads), dx = poisoned(type, n);
      BOTH(qk_norm_rope_forward, type, P(x), batch, time, heads, hd, 1e-6f, P(cosine), P(sine),
           P(y), P(rstd));
      CHECK_AGREE("qk norm and rope", &y);
      CHECK_AGREE("rstd", &rstd);
      BOTH(qk_norm_rope_backward, type, P(dy), P(x), P(rstd), batch, time, heads, hd, P(cosine),
           P(sine), P(dx));
      CHECK_AGREE("qk norm and rope backward", &dx);
      BOTH(qk_norm_rope_backward, type, P(dy), P(x), P(rstd), batch, time, heads, hd, P(cosine),
           P(sine), P(dy));
      CHECK_AGREE("qk norm and rope backward in place", &dy);
      free(table);
      drop_twins();
    }
}

TEST(swiglu) {
  unit_seed(44);
  int64_t sizes[] = {1, 7, 8, 37, 1023, 5000};
  for (int c = 0; c < 6; c++) FOR_EACH_TYPE(type) {
      int64_t n = sizes[c];
      twin gate = normals(type, n, 3), up = normals(type, n, 1), dy = normals(type, n, 1);
      twin y = poisoned(type, n), dgate = poisoned(type, n), dup = poisoned(type, n);
      BOTH(swiglu_forward, type, P(gate), P(up), n, P(y));
      CHECK_AGREE("swiglu", &y);
      BOTH(swiglu_backward, type, P(dy), P(gate), P(up), n, P(dgate), P(dup));
      CHECK_AGREE("dgate", &dgate);
      CHECK_AGREE("dup", &dup);
      BOTH(swiglu_backward, type, P(dy), P(gate), P(up), n, P(gate), P(up));
      CHECK_AGREE("dgate in place", &gate);
      CHECK_AGREE("dup in place", &up);
      drop_twins();
    }
}

/* The gradient lies in the logits' rows, in BF16 in the first half of each. */
static twin gradient_rows(pg_dtype type, const twin *logits, int64_t n, int64_t vocab, int64_t ld) {
  size_t size = type_size(type), row = (size_t)vocab * size;
  char *gpu = from_gpu(logits), *packed = malloc((size_t)n * row + 1);
  twin t = poisoned(type, n * vocab);
  for (int64_t i = 0; i < n; i++) memcpy(packed + (size_t)i * row, gpu + (size_t)(i * ld) * 4, row);
  if (sides[GPU].k->upload(sides[GPU].q, t.at[GPU], packed, (size_t)n * row) < 0) abort();
  for (int64_t i = 0; i < n; i++)
    memcpy((char *)t.at[CPU] + (size_t)i * row, (char *)logits->at[CPU] + (size_t)(i * ld) * 4,
           row);
  free(gpu), free(packed);
  return t;
}

TEST(cross_entropy) {
  unit_seed(45);
  int64_t shapes[][3] = {{1, 2, 2}, {37, 97, 97}, {5, 97, 100}, {3, 1023, 1024}, {2, 50257, 50304}};
  for (int c = 0; c < 5; c++) FOR_EACH_TYPE(type) {
      int64_t n = shapes[c][0], vocab = shapes[c][1], ld = shapes[c][2];
      float logit_scale = c == 1 ? 0.5f : 1.0f;
      twin z = normals(PG_F32, n * ld, 4), targets = tokens_below(n, vocab);
      twin loss = poisoned(PG_F32, n), loss2 = poisoned(PG_F32, n);
      twin before = clone(&z);
      BOTH(cross_entropy, type, P(z), n, vocab, ld, P(targets), logit_scale, 0.25f, false, P(loss));
      CHECK_AGREE("loss", &loss);
      CHECK_SAME("logits without a gradient", &z);
      void *a = from_gpu(&z), *b = from_gpu(&before);
      CHECK(!memcmp(a, b, twin_bytes(&z)), "logits changed");
      free(a);
      BOTH(cross_entropy, type, P(z), n, vocab, ld, P(targets), logit_scale, 0.25f, true, P(loss2));
      CHECK_AGREE("loss with a gradient", &loss2);
      twin gradient = gradient_rows(type, &z, n, vocab, ld);
      CHECK_AGREE("gradient", &gradient);
      a = from_gpu(&z);
      for (int64_t i = 0; i < n; i++) /* columns from vocab on */
        CHECK(!memcmp((float *)a + i * ld + vocab, (float *)b + i * ld + vocab,
                      (size_t)(ld - vocab) * 4),
              "row %lld: padding changed", (long long)i);
      free(a), free(b);
      drop_twins();
    }
}

/* Logits that are not finite give a loss that is not; large ones do not overflow. */
TEST(cross_entropy_extremes) {
  float z[] = {1, NAN, 3, 1, INFINITY, 3, 500, -500, 400, -INFINITY, 0, 1};
  int32_t targets[] = {0, 1, 1, 2};
  FOR_EACH_TYPE(type) {
    twin logits = twin_of(PG_F32, 12, z), t = twin_of(PG_I32, 4, targets);
    twin loss = poisoned(PG_F32, 4);
    BOTH(cross_entropy, type, P(logits), 4, 3, 3, P(t), 1.0f, 1.0f, true, P(loss));
    float *got = from_gpu(&loss), *want = loss.at[CPU];
    CHECK(!isfinite(got[0]) && !isfinite(got[1]), "%g %g", (double)got[0], (double)got[1]);
    CHECK_CLOSE(got[2], want[2], 1e-6);
    CHECK_CLOSE(got[3], want[3], 1e-6);
    free(got);
    drop_twins();
  }
}

TEST(row_range) {
  unit_seed(46);
  int64_t shapes[][3] = {{1, 1, 1}, {37, 97, 97}, {5, 97, 101}, {2, 1023, 1023}, {2, 50257, 50304}};
  for (int c = 0; c < 5; c++) {
    int64_t n = shapes[c][0], vocab = shapes[c][1], ld = shapes[c][2];
    twin z = normals(PG_F32, n * ld, 4), out = poisoned(PG_F32, n);
    BOTH(row_range, P(z), n, vocab, ld, P(out));
    CHECK_SAME("range", &out);
    drop_twins();
  }
  float bad[] = {1, 2, NAN, 1, INFINITY, 2};
  twin z = twin_of(PG_F32, 6, bad), out = poisoned(PG_F32, 2);
  BOTH(row_range, P(z), 2, 3, 3, P(out));
  float *got = from_gpu(&out), *want = out.at[CPU];
  for (int i = 0; i < 2; i++)
    CHECK(isfinite(got[i]) == isfinite(want[i]), "row %d: %g, want %g", i, (double)got[i],
          (double)want[i]);
  free(got);
  drop_twins();
}

int main(void) {
  open_sides();
  RUN(embedding);
  RUN(rmsnorm);
  RUN(qk_norm_rope);
  RUN(swiglu);
  RUN(cross_entropy);
  RUN(cross_entropy_extremes);
  RUN(row_range);
  return close_sides();
}
