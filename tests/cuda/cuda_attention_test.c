/* Causal attention on the device. In bf16 each side may round probabilities, and the sums that use
 * them, to 8 bits (2^-9 each) in its own place: bound 1e-2. */
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
  twin dq = poisoned(type, n), dk = poisoned(type, n), dv = poisoned(type, n), dv2 = clone(&dv);
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
     P(dq), P(dk), P(dv2));
  void *a = from_gpu(&dv), *b = from_gpu(&dv2);
  CHECK(!memcmp(a, b, twin_bytes(&dv)), "two runs differ");
  free(a), free(b);
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

int main(void) {
  open_sides();
  RUN(head_dims);
  RUN(times);
  RUN(large_scores);
  RUN(long_sequence);
  return close_sides();
}
