/* Element-wise operations on the device: the bits of the CPU's, for every layout of views, in
 * place, with special and very small numbers; and optimizers written from them. */
#include "cuda_unit.h"

#define BINARY_OPS 14
#define UNARY_OPS 13

/* On a GPU exp, log, tanh and pow are NVIDIA's, within 2 units of the last place (pow 4); in the
 * emulation they are those of the CPU's library. */
static void check_result(const char *name, int op, const twin *out, bool library) {
  char text[64];
  snprintf(text, sizeof text, "%s %d", name, op);
#ifdef PG_CUDAEMU
  library = false;
#endif
  if (library)
    CHECK_WITHIN(text, out, 8 * 0x1p-23);
  else
    CHECK_SAME(text, out);
}

/* Views of one buffer: element (i,j) at offset + i*row + j*column. */
typedef struct shape {
  int64_t rows, columns, a[3], b[3], out[3]; /* offset, row, column */
} shape;
static const shape shapes[] = {
    {1, 1, {0, 1, 1}, {0, 1, 1}, {0, 1, 1}},          /* one element */
    {1, 37, {0, 37, 1}, {0, 37, 1}, {0, 37, 1}},      /* one row with a tail */
    {5, 64, {0, 64, 1}, {0, 64, 1}, {0, 64, 1}},      /* flat */
    {7, 33, {0, 33, 1}, {0, 33, 1}, {0, 33, 1}},      /* flat, rows not aligned */
    {7, 33, {1, 33, 1}, {0, 33, 1}, {0, 33, 1}},      /* one operand not aligned */
    {6, 20, {0, 24, 1}, {4, 28, 1}, {8, 32, 1}},      /* aligned rows with gaps */
    {6, 19, {0, 24, 1}, {4, 28, 1}, {8, 32, 1}},      /* the same with tails */
    {9, 18, {3, 21, 1}, {1, 19, 1}, {2, 23, 1}},      /* nothing aligned */
    {6, 20, {0, 20, 1}, {2, 1, 0}, {0, 20, 1}},       /* a column of factors */
    {6, 21, {0, 21, 1}, {2, 0, 1}, {0, 21, 1}},       /* a row of factors */
    {6, 20, {5, 0, 0}, {0, 20, 1}, {0, 20, 1}},       /* one factor */
    {20, 6, {0, 1, 20}, {0, 1, 20}, {0, 1, 20}},      /* transposed */
    {20, 6, {0, 1, 20}, {0, 6, 1}, {0, 6, 1}},        /* one operand transposed */
    {20, 6, {0, 6, 1}, {0, 1, 20}, {0, 1, 20}},       /* and the result */
    {23, 1, {0, 1, 1}, {0, 3, 1}, {0, 2, 1}},         /* columns */
    {4, 5, {0, 30, 3}, {1, 17, 2}, {2, 40, 7}},       /* strides everywhere */
    {0, 5, {0, 5, 1}, {0, 5, 1}, {0, 5, 1}},          /* nothing */
    {1, 1023, {0, 1023, 1}, {0, 0, 0}, {0, 1023, 1}}, /* longer than a block */
};
#define SHAPES (int)(sizeof shapes / sizeof *shapes)
#define ROOM 1100

#define VIEW(t, v) ((pg_view){F(t, (v)[0]), (v)[1], (v)[2]})

TEST(binary_in_every_layout) {
  unit_seed(1);
  for (int c = 0; c < SHAPES; c++) {
    const shape *s = &shapes[c];
    for (int op = 0; op < BINARY_OPS; op++) {
      twin a = normals(PG_F32, ROOM, 1), b = normals(PG_F32, ROOM, 1);
      twin out = op == PG_POW ? normals(PG_F32, ROOM, 1) : poisoned(PG_F32, ROOM);
      if (op == PG_POW)
        BOTH(unary, PG_ABS, ((pg_view){F(a, 0), 1, 1}), 1, ROOM, ((pg_view){F(a, 0), 1, 1}));
      BOTH(binary, (pg_binary_op)op, VIEW(a, s->a), VIEW(b, s->b), s->rows, s->columns,
           VIEW(out, s->out));
      /* The whole buffer: what lies between the elements is untouched on both sides. */
      check_result("binary", op * 100 + c, &out, op == PG_POW);
      drop_twins();
    }
  }
}

TEST(binary_in_place) {
  unit_seed(2);
  for (int c = 0; c < SHAPES; c++) {
    const shape *s = &shapes[c];
    twin a = normals(PG_F32, ROOM, 1), b = normals(PG_F32, ROOM, 1);
    if (s->a[1] && s->a[2])
      BOTH(binary, PG_SUB, VIEW(a, s->a), VIEW(b, s->b), s->rows, s->columns, VIEW(a, s->a));
    check_result("out is a", c, &a, false);
    if (s->b[1] && s->b[2])
      BOTH(binary, PG_DIV, VIEW(a, s->a), VIEW(b, s->b), s->rows, s->columns, VIEW(b, s->b));
    check_result("out is b", c, &b, false);
    drop_twins();
  }
}

TEST(scalar_and_lerp) {
  unit_seed(3);
  for (int c = 0; c < SHAPES; c++) {
    const shape *s = &shapes[c];
    twin a = normals(PG_F32, ROOM, 1), b = normals(PG_F32, ROOM, 1), out = poisoned(PG_F32, ROOM);
    twin x = clone(&a);
    BOTH(scalar, PG_DIV, VIEW(a, s->a), 0.1, true, s->rows, s->columns, VIEW(out, s->out));
    check_result("scalar / a", c, &out, false);
    BOTH(scalar, PG_MUL, VIEW(a, s->a), 1.0 / 3, false, s->rows, s->columns, VIEW(out, s->out));
    check_result("a * scalar", c, &out, false);
    if (s->a[1] && s->a[2]) BOTH(lerp, VIEW(x, s->a), VIEW(b, s->b), 0.05, s->rows, s->columns);
    check_result("lerp", c, &x, false);
    drop_twins();
  }
}

TEST(unary_in_every_layout) {
  unit_seed(4);
  for (int c = 0; c < SHAPES; c++) {
    const shape *s = &shapes[c];
    for (int op = 0; op < UNARY_OPS; op++) {
      bool library = op == PG_EXP || op == PG_LOG || op == PG_TANH;
      twin a = normals(PG_F32, ROOM, 1), out = normals(PG_F32, ROOM, 1);
      if (op == PG_SQRT || op == PG_LOG)
        BOTH(unary, PG_ABS, ((pg_view){F(a, 0), 1, 1}), 1, ROOM, ((pg_view){F(a, 0), 1, 1}));
      BOTH(unary, (pg_unary_op)op, VIEW(a, s->a), s->rows, s->columns, VIEW(out, s->out));
      check_result("unary", op * 100 + c, &out, library);
      if (s->a[1] && s->a[2]) {
        BOTH(unary, (pg_unary_op)op, VIEW(a, s->a), s->rows, s->columns, VIEW(a, s->a));
        check_result("unary in place", op * 100 + c, &a, library);
      }
      drop_twins();
    }
  }
}

/* Zeros, infinities, NaN, the ends of the range, and numbers below 2^-126, which arithmetic and
 * comparisons take for 0. Selecting operations (min, max) may keep their bits, so for those they
 * are left out. */
static const float special[] = {
    0.0f,      -0.0f,      1.0f,      -1.0f,      INFINITY, -INFINITY, NAN,      3.4e38f, -3.4e38f,
    0x1p-126f, -0x1p-126f, 1.5f,      -2.5f,      16777216, 1e-30f,    -1e-30f,  0.1f,    88.8f,
    -90.0f,    104.0f,     0x1p-130f, -0x1p-130f, 1e-45f,   -3e-39f,   0x1p-127f};
#define SPECIAL (int)(sizeof special / sizeof *special)
#define NORMAL 20

TEST(special_numbers) {
  twin x = twin_of(PG_F32, SPECIAL, special), out = poisoned(PG_F32, SPECIAL * SPECIAL);
  for (int op = 0; op < BINARY_OPS; op++) {
    int64_t n = op == PG_MIN || op == PG_MAX ? NORMAL : SPECIAL;
    if (op == PG_POW) continue;
    BOTH(binary, (pg_binary_op)op, ((pg_view){F(x, 0), 1, 0}), ((pg_view){F(x, 0), 0, 1}), n, n,
         ((pg_view){F(out, 0), n, 1}));
    check_result("special pairs", op, &out, false);
  }
  for (int op = 0; op < UNARY_OPS; op++) {
    bool library = op == PG_EXP || op == PG_LOG || op == PG_TANH;
#ifndef PG_CUDAEMU
    if (library) continue; /* infinite and NaN results have no relative error */
#endif
    twin y = poisoned(PG_F32, SPECIAL);
    BOTH(unary, (pg_unary_op)op, ((pg_view){F(x, 0), 0, 1}), 1, library ? NORMAL : SPECIAL,
         ((pg_view){F(y, 0), 0, 1}));
    check_result("special", op, &y, library);
  }
  drop_twins();
}

/* Products that need rounding, where a fused multiply-add would give other bits. */
TEST(no_contraction) {
  unit_seed(5);
  int64_t n = 5000;
  twin x = normals(PG_F32, n, 1), y = normals(PG_F32, n, 1), fused = poisoned(PG_F32, n);
  float *want = fused.at[CPU];
  const float *a = x.at[CPU], *b = y.at[CPU];
  int64_t differ = 0;
  for (int64_t i = 0; i < n; i++) {
    want[i] = fmaf(0.9f, a[i], 0.1f * b[i]);
    differ += want[i] != 0.9f * a[i] + 0.1f * b[i];
  }
  CHECK(differ > 100, "%lld elements tell", (long long)differ);
  BOTH(lerp, ((pg_view){F(x, 0), n, 1}), ((pg_view){F(y, 0), n, 1}), 0.1, 1, n);
  CHECK_SAME("lerp", &x);
  drop_twins();
}

/* AdamW as a Lua optimizer writes it against the kernel: the same bits on the device, over steps
 * in which v falls below 2^-126 for some elements. */
TEST(lua_optimizer_equals_kernel) {
  unit_seed(6);
  int64_t n = 777;
  twin g = normals(PG_F32, n, 1), m = normals(PG_F32, n, 0), v = normals(PG_F32, n, 0);
  twin m2 = clone(&m), v2 = clone(&v), s = poisoned(PG_F32, n), s2 = poisoned(PG_F32, n);
  twin t = poisoned(PG_F32, n);
  pg_adamw h = {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
#define V(x) ((pg_view){F(x, 0), n, 1})
  BOTH(scalar, PG_MUL, V(g), 1e-19, false, 1, n / 2, V(g));
  for (int step = 1; step <= 4; step++) {
    h.correction1 = 1 / (1 - pow(h.beta1, step));
    h.correction2 = 1 / (1 - pow(h.beta2, step));
    BOTH(adamw, &h, P(g), n, P(m), P(v), &(pg_target){.increment = P(s)});
    BOTH(lerp, V(m2), V(g), 1 - h.beta1, 1, n);
    BOTH(unary, PG_SQUARE, V(g), 1, n, V(t));
    BOTH(lerp, V(v2), V(t), 1 - h.beta2, 1, n);
    BOTH(scalar, PG_MUL, V(v2), h.correction2, false, 1, n, V(t));
    BOTH(unary, PG_SQRT, V(t), 1, n, V(t));
    BOTH(scalar, PG_ADD, V(t), h.eps, false, 1, n, V(t));
    BOTH(scalar, PG_MUL, V(m2), h.correction1, false, 1, n, V(s2));
    BOTH(scalar, PG_MUL, V(s2), -h.lr, false, 1, n, V(s2));
    BOTH(binary, PG_DIV, V(s2), V(t), 1, n, V(s2));
    CHECK_SAME("kernel", &s);
    CHECK_SAME("m", &m);
    CHECK_SAME("v", &v);
    CHECK_SAME("operations", &s2);
    void *a = from_gpu(&s), *b = from_gpu(&s2), *c = from_gpu(&v), *d = from_gpu(&v2);
    CHECK(!memcmp(a, b, twin_bytes(&s)) && !memcmp(c, d, twin_bytes(&v)), "step %d differs", step);
    free(a), free(b), free(c), free(d);
  }
  drop_twins();
}

int main(void) {
  open_sides();
  RUN(binary_in_every_layout);
  RUN(binary_in_place);
  RUN(scalar_and_lerp);
  RUN(unary_in_every_layout);
  RUN(special_numbers);
  RUN(no_contraction);
  RUN(lua_optimizer_equals_kernel);
  return close_sides();
}
