/* Reductions on the device: extremes and their places exactly, sums to one rounding. */
#include "cuda_unit.h"

#define OPS 7

typedef struct shape {
  int64_t rows, columns, offset, row, column;
} shape;
static const shape shapes[] = {{1, 1, 0, 1, 1},   {1, 37, 0, 37, 1},       {37, 1, 0, 1, 1},
                               {37, 1, 3, 5, 1},  {5, 64, 0, 64, 1},       {5, 64, 1, 64, 1},
                               {9, 33, 0, 33, 1}, {9, 33, 4, 40, 1},       {33, 9, 0, 1, 33},
                               {33, 9, 0, 1, 40}, {6, 7, 2, 50, 3},        {7, 6, 0, 0, 1},
                               {200, 3, 0, 3, 1}, {3, 1023, 0, 1023, 1},   {2, 1500, 0, 1500, 1},
                               {600, 5, 0, 5, 1}, {2, 20000, 0, 20001, 1}, {1, 30000, 1, 30000, 1},
                               {4, 0, 0, 0, 1},   {0, 4, 0, 4, 1},         {5000, 2, 0, 2, 1}};
#define SHAPES (int)(sizeof shapes / sizeof *shapes)
#define ROOM 40100

/* The sums of the two sides differ by n 2^-53 sum |x| in fp64, so the rounded results by that and
 * one unit of the last place of either; everything else is equal. */
static void check_results(const char *what, int op, const shape *s, int axis, const twin *out,
                          double size, int64_t n) {
  float *got = from_gpu(out), *want = out->at[CPU];
  double factor = op == PG_MEAN ? 1.0 / (double)n : 1;
  for (int64_t i = 0; i < out->n; i++) {
    double slack = 0;
    if (op == PG_SUM || op == PG_MEAN)
      slack = fabs((double)want[i]) * 0x1p-23 + 2 * (double)n * 0x1p-53 * size * factor;
    if (op == PG_NORM) slack = fabs((double)want[i]) * 0x1p-23;
    bool same = got[i] == want[i] || (isnan(got[i]) && isnan(want[i])) ||
                fabs((double)got[i] - (double)want[i]) <= slack;
    CHECK(same, "%s: op %d, axis %d, [%lld,%lld], result %lld: %.9g, want %.9g", what, op, axis,
          (long long)s->rows, (long long)s->columns, (long long)i, (double)got[i], (double)want[i]);
    if (!same) break;
  }
  free(got);
}

static void check_shape(const char *what, const shape *s, const twin *x) {
  double size = 0;
  for (int64_t i = 0; i < s->rows; i++)
    for (int64_t j = 0; j < s->columns; j++)
      size += fabs((double)((float *)x->at[CPU])[s->offset + i * s->row + j * s->column]);
  for (int op = 0; op < OPS; op++)
    for (int axis = -1; axis <= 1; axis++) {
      int64_t results = axis < 0 ? 1 : axis == 0 ? s->columns : s->rows;
      int64_t n = axis < 0 ? s->rows * s->columns : axis == 0 ? s->rows : s->columns;
      twin out = poisoned(PG_F32, results);
      BOTH(reduce, (pg_reduce_op)op, ((pg_view){F(*x, s->offset), s->row, s->column}), s->rows,
           s->columns, axis, P(out));
      check_results(what, op, s, axis, &out, size, n);
    }
}

TEST(all_shapes) {
  unit_seed(21);
  for (int c = 0; c < SHAPES; c++) {
    twin x = normals(PG_F32, ROOM, 1);
    check_shape("normal", &shapes[c], &x);
    drop_twins();
  }
}

/* Few different values: the first of many equals counts. */
TEST(ties) {
  unit_seed(22);
  for (int c = 0; c < SHAPES; c++) {
    float *host = malloc(ROOM * sizeof *host);
    for (int64_t i = 0; i < ROOM; i++) host[i] = (float)unit_below(3) - 1;
    twin x = twin_of(PG_F32, ROOM, host);
    check_shape("ties", &shapes[c], &x);
    free(host);
    drop_twins();
  }
}

/* NaN beats everything, the first one is found; infinities are numbers. */
TEST(nan_and_infinity) {
  unit_seed(23);
  for (int c = 0; c < SHAPES; c++)
    for (int kind = 0; kind < 3; kind++) {
      if (kind == 1 + c % 2) continue; /* of the infinities one kind for each shape */
      float *host = malloc(ROOM * sizeof *host);
      for (int64_t i = 0; i < ROOM; i++) {
        float rare = unit_uniform() < 0.5 ? INFINITY : -INFINITY;
        if (kind == 0) rare = NAN;
        host[i] = kind == 2 || unit_uniform() < 0.02 ? rare : unit_normal();
        if (kind == 2) host[i] = -INFINITY;
      }
      twin x = twin_of(PG_F32, ROOM, host);
      check_shape(kind == 0 ? "NaN" : "infinities", &shapes[c], &x);
      free(host);
      drop_twins();
    }
}

/* Sums in fp32 would lose all of these digits. */
TEST(sums_are_fp64) {
  int64_t n = 3000;
  float *host = malloc((size_t)n * sizeof *host);
  for (int64_t i = 0; i < n; i++) host[i] = i % 3 == 0 ? 1e9f : i % 3 == 1 ? -1e9f : 1e-3f;
  twin x = twin_of(PG_F32, n, host);
  for (int axis = -1; axis <= 1; axis++) {
    twin out = poisoned(PG_F32, 1);
    int64_t rows = axis == 0 ? n : 1;
    ON(GPU, reduce, PG_SUM, ((pg_view){F(x, 0), axis == 0 ? 1 : n, axis == 0 ? 3 : 1}), rows,
       n / rows, axis, P(out));
    float *got = from_gpu(&out);
    CHECK(fabs((double)*got - 1) < 1e-4, "axis %d: %g, want 1", axis, (double)*got);
    free(got);
  }
  free(host);
  drop_twins();
}

int main(void) {
  open_sides();
  RUN(all_shapes);
  RUN(ties);
  RUN(nan_and_infinity);
  RUN(sums_are_fp64);
  return close_sides();
}
