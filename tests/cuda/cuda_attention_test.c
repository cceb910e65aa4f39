/* Causal attention on the device. In bf16 each side may round probabilities, and the sums that use
 * them, to 8 bits (2^-9 each) in its own place: bound 1e-2. On a GPU both the plain kernel and
 * cuDNN's attention are compared, the latter where it runs. */
#include "cuda_unit.h"

typedef struct shape {
  int64_t batch, time, heads, head_dim;
} shape;

static void check_attention(const shape *s, pg_dtype type, double spread) {
  int64_t n = s->batch * s->time * s->heads * s->head_dim;
  double bound = type == PG_BF16 ? 1e-2 : 1e-5;
  char name[96];
  twin query = normals(type, n, spread), key = normals(type, n, 1), value = normals(type, n, 1);
  twin dout = normals(type, n, 1), out = poisoned(type, n);
  twin lse = poisoned(PG_F32, s->batch * s->heads * s->time);
  twin dq = poisoned(type, n), dk = poisoned(type, n), dv = poisoned(type, n);
  twin again[3] = {poisoned(type, n), poisoned(type, n), poisoned(type, n)};
#define SHAPE s->batch, s->time, s->heads, s->head_dim
#define NAMED(what)                                                                                \
  (snprintf(name, sizeof name, "%s [%lld,%lld,%lld,%lld]", what, (long long)s->batch,              \
            (long long)s->time, (long long)s->heads, (long long)s->head_dim),                      \
   name)
  BOTH(attention_forward, type, P(query), P(key), P(value), SHAPE, P(out), P(lse));
  CHECK_WITHIN(NAMED("out"), &out, bound);
  CHECK_WITHIN(NAMED("lse"), &lse, bound);
  BOTH(attention_backward, type, P(dout), P(query), P(key), P(value), P(out), P(lse), SHAPE, P(dq),
       P(dk), P(dv));
  /* A single position attends to itself alone: these gradients are rounding errors of zero. */
  if (s->time > 1) {
    CHECK_WITHIN(NAMED("dquery"), &dq, bound);
    CHECK_WITHIN(NAMED("dkey"), &dk, bound);
  } else {
    void *got[2] = {from_gpu(&dq), from_gpu(&dk)};
    for (int64_t i = 0; i < n; i++)
      CHECK(fabs(value_of(type, got[0], i)) < 0.1 && fabs(value_of(type, got[1], i)) < 0.1,
            "gradient of a single position");
    free(got[0]), free(got[1]);
  }
  CHECK_WITHIN(NAMED("dvalue"), &dv, bound);
  ON(GPU, attention_backward, type, P(dout), P(query), P(key), P(value), P(out), P(lse), SHAPE,
     P(again[0]), P(again[1]), P(again[2]));
  const twin *first[3] = {&dq, &dk, &dv};
  for (int i = 0; i < 3; i++) {
    void *a = from_gpu(first[i]), *b = from_gpu(&again[i]);
    CHECK(!memcmp(a, b, twin_bytes(&dv)), "two runs differ in gradient %d", i);
    free(a), free(b);
  }
  drop_twins();
}

static void check_both(const shape *s, double spread) {
  check_attention(s, PG_F32, spread);
  check_attention(s, PG_BF16, spread);
}

TEST(head_dims) {
  unit_seed(51);
  int64_t dims[] = {2, 18, 64, 72, 128};
  for (int c = 0; c < 5; c++) check_both(&(shape){2, 37, 2, dims[c]}, 1);
}

TEST(times) {
  unit_seed(52);
  int64_t times[] = {1, 2, 63, 64, 65, 130};
  for (int c = 0; c < 6; c++) check_both(&(shape){1, times[c], 3, 18}, 1);
}

/* Scores of tens: the maximum moves from tile to tile. */
TEST(large_scores) {
  unit_seed(53);
  check_both(&(shape){1, 150, 1, 18}, 20);
}

TEST(long_sequence) {
  unit_seed(54);
  check_both(&(shape){1, UNIT_SLOW ? 261 : 1023, 1, 2}, 1);
}

/* Starts the device's queue again. */
static void restart(void) {
  const pg_queue_options options = {.threads = 1};
  struct side *gpu = &sides[GPU];
  char text[400] = "";
  gpu->k->queue_free(gpu->q);
  if (gpu->k->queue_new(&options, &gpu->q, text, sizeof text) < 0) abort();
}

/* Whoever asks before the first call hears what it would say. */
static void check_path(int64_t head_dim) {
  char text[400] = "";
  for (int type = PG_F32; type <= PG_BF16; type++)
    ON(GPU, attention_path, (pg_dtype)type, 2, 70, 2, head_dim, text, sizeof text);
}
static void check_refused(int64_t head_dim, const char *part) {
  const struct side *gpu = &sides[GPU];
  char text[400] = "";
  for (int type = PG_F32; type <= PG_BF16; type++) {
    CHECK(gpu->k->attention_path(gpu->q, (pg_dtype)type, 2, 70, 2, head_dim, text, sizeof text) ==
          -1);
    CHECK(strstr(gpu->k->message(gpu->q), part), "%s", gpu->k->message(gpu->q));
  }
}
/* Not a multiple of 8, so that cuDNN cannot take it either. */
TEST(head_dim_limit) {
  check_path(254);
  check_path(256);
  check_refused(258, "head_dim is 258; attention goes up to 256");
}

#ifdef PG_CUDAEMU
/* A GPU with the least shared memory there is, 99 KiB, has smaller tiles; with less it is refused
 * in words. */
TEST(little_shared_memory) {
  unit_seed(57);
  emulate("CUDAEMU_SHARED", "99k");
  restart();
  for (int64_t d = 72; d <= 128; d += 56) check_both(&(shape){2, 70, 2, d}, 1);
  twin x = normals(PG_F32, 2 * 256, 1), out = poisoned(PG_F32, 2 * 256), lse = poisoned(PG_F32, 2);
  const struct side *gpu = &sides[GPU];
  side_ = GPU;
  CHECK(gpu->k->attention_forward(gpu->q, PG_F32, P(x), P(x), P(x), 1, 2, 1, 256, P(out), P(lse)) <
        0);
  CHECK(strstr(gpu->k->message(gpu->q), "head_dim 256") && strstr(gpu->k->message(gpu->q), "99"),
        "%s", gpu->k->message(gpu->q));
  check_refused(256, "head_dim 256 needs");
  check_path(128);
  emulate("CUDAEMU_SHARED", NULL);
  restart();
  drop_twins();
}
#endif

#ifndef PG_CUDAEMU
/* The shapes of the plain tests again, in bf16, as cuDNN divides them: whole tiles, the rest of a
 * tile, shapes that it leaves to the plain kernel, and one that takes several parts. */
TEST(cudnn) {
  static const shape shapes[] = {
      {2, 1, 2, 64},    {2, 37, 2, 18},   {2, 37, 2, 64},   {2, 37, 3, 72},   {2, 37, 2, 128},
      {2, 128, 3, 64},  {1, 256, 3, 128}, {2, 1023, 2, 64}, {2, 1023, 2, 72}, {2, 1023, 2, 128},
      {1, 1024, 2, 64}, {3, 130, 5, 64},  {9, 2048, 4, 8},
  };
  unit_seed(55);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const shape *s = &shapes[i];
    char text[400] = "";
    ON(GPU, attention_path, PG_BF16, s->batch, s->time, s->heads, s->head_dim, text, sizeof text);
    printf("  [%lld,%lld,%lld,%lld]: %s\n", (long long)s->batch, (long long)s->time,
           (long long)s->heads, (long long)s->head_dim, text);
    CHECK(strncmp(text, "cuDNN", 5) == 0 || s->time == 1 || s->head_dim % 8 != 0);
    check_attention(s, PG_BF16, 1);
  }
}

TEST(cudnn_large_scores) {
  unit_seed(56);
  check_attention(&(shape){2, 150, 2, 64}, PG_BF16, 20);
}

/* The same under another PG_ATTENTION; whether cuDNN works there. */
static bool reopen(const char *wish) {
  struct side *gpu = &sides[GPU];
  char text[400] = "";
  if (wish)
    setenv("PG_ATTENTION", wish, 1);
  else
    unsetenv("PG_ATTENTION");
  restart();
  if (gpu->k->attention_path(gpu->q, PG_BF16, 1, 1024, 1, 64, text, sizeof text) < 0) abort();
  printf("attention: %s\n", text);
  return strncmp(text, "cuDNN", 5) == 0;
}
#endif

int main(void) {
  open_sides();
#ifndef PG_CUDAEMU
  reopen("plain");
#endif
  RUN(head_dims);
  RUN(head_dim_limit);
  RUN(times);
  RUN(large_scores);
  RUN(long_sequence);
#ifdef PG_CUDAEMU
  RUN(little_shared_memory);
#else
  if (reopen(NULL)) {
    RUN(cudnn);
    RUN(cudnn_large_scores);
  }
#endif
  return close_sides();
}
