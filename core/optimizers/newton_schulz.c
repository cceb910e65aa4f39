#include "newton_schulz.h"

#include <float.h>
#include <math.h>

static const double quintic[][3] = {{3.4445, -4.7750, 2.0315}};
static const double polar_express[][3] = {
    {8.156554524902461, -22.48329292557795, 15.878769915207462},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
static const double dion[][3] = {{4.0848, -6.8946, 2.9270},
                                 {3.9505, -6.3029, 2.6377},
                                 {3.7418, -5.5913, 2.3037},
                                 {2.8769, -3.1427, 1.2046},
                                 {2.8366, -3.0525, 1.2012}};
/* Published as multiples of 1/1024. */
#define PARTS(a, b, c)                                                                             \
  { a / 1024.0, b / 1024.0, c / 1024.0 }
static const double modula[][3] = {PARTS(3955, -8306, 5008), PARTS(3735, -6681, 3463),
                                   PARTS(3799, -6499, 3211), PARTS(4019, -6385, 2906),
                                   PARTS(2677, -3029, 1162), PARTS(2172, -1833, 682)};
/* Published for singular values up to 1, and used for up to 1.05: x / 1.05 in place of x. The last
 * is the fifth-order step of the inverse root and leaves 1 at 1. */
#define FOR_105(a, b, c)                                                                           \
  { a / 1.05, b / (1.05 * 1.05 * 1.05), c / (1.05 * 1.05 * 1.05 * 1.05 * 1.05) }
static const double gram[][3] = {
    FOR_105(8.28721201814563, -23.595886519098837, 17.300387312530933),
    FOR_105(4.107059111542203, -2.9478499167379106, .5448431082926601),
    FOR_105(3.9486908534822946, -2.908902115962949, .5518191394370137),
    FOR_105(3.3184196573706015, -2.488488024314874, .51004894012372),
    FOR_105(2.300652019954817, -1.6689039845747493, .4188073119525673),
    FOR_105(1.891301407787398, -1.2679958271945868, .37680408948524835),
    FOR_105(1.8750014808534479, -1.2500016453999487, .3750001645474248),
    {1.875, -1.25, .375}};
static const struct {
  const double (*steps)[3];
  int count;
  double room;
} sets[] = {[PG__QUINTIC] = {quintic, PG_COUNT(quintic), 1},
            [PG__POLAR_EXPRESS] = {polar_express, PG_COUNT(polar_express), 1.02},
            [PG__DION] = {dion, PG_COUNT(dion), 1},
            [PG__MODULA] = {modula, PG_COUNT(modula), 1},
            [PG__GRAM] = {gram, PG_COUNT(gram), 1}};

int64_t pg__polar_bytes(int64_t count, int64_t rows, int64_t columns) {
  const int64_t small = pg__min(rows, columns);
  return count * (2 * (rows * columns + small * small) + 1) * (int64_t)sizeof(float);
}

pg__polar pg__polar_in(void *memory, int64_t capacity, int64_t rows, int64_t columns,
                       pg_dtype type) {
  const int64_t size = (int64_t)pg_dtype_size(type), small = pg__min(rows, columns);
  const int64_t square = capacity * small * small, matrix = capacity * rows * columns;
  char *a = memory, *p = a + square * size, *direction = p + square * size;
  char *x = type == PG_F32 ? direction : direction + matrix * (int64_t)sizeof(float);
  return (pg__polar){.count = capacity,
                     .rows = rows,
                     .columns = columns,
                     .small = small,
                     .type = type,
                     .a = a,
                     .p = p,
                     .direction = (float *)(void *)direction,
                     .x = x,
                     .next = x + matrix * size,
                     .norm = (float *)(void *)(x + 2 * matrix * size)};
}

/* One Newton-Schulz step on all of them: c->next from c->x, then the two change places. In
 * fp32 `a` is added to the diagonal of b A + c A A, a pass over the small matrix instead of one
 * over X; in bf16 that would round it, and the product adds a X to its sum. */
static int step(pg_context *ctx, pg__polar *c, const double f[3]) {
  const int64_t rows = c->rows, columns = c->columns, n = c->small;
  const int64_t matrix = rows * columns, square = n * n;
  const bool tall = rows > columns, wide = c->type == PG_F32;
  int status = 0;
  const pg_gemm gram = {.transpose_a = tall,
                        .transpose_b = !tall,
                        .m = n,
                        .n = n,
                        .k = tall ? rows : columns,
                        .alpha = 1,
                        .a = c->x,
                        .b = c->x,
                        .c = c->a,
                        .lda = columns,
                        .ldb = columns,
                        .ldc = n,
                        .type_a = c->type,
                        .type_b = c->type,
                        .type_c = c->type,
                        .batch = c->count,
                        .stride_a = matrix,
                        .stride_b = matrix,
                        .stride_c = square,
                        .symmetric = true};
  const pg_gemm power = {.m = n,
                         .n = n,
                         .k = n,
                         .alpha = (float)f[2],
                         .beta = (float)f[1],
                         .a = c->a,
                         .b = c->a,
                         .c = c->p,
                         .addend = c->a,
                         .lda = n,
                         .ldb = n,
                         .ldc = n,
                         .type_a = c->type,
                         .type_b = c->type,
                         .type_c = c->type,
                         .batch = c->count,
                         .stride_a = square,
                         .stride_b = square,
                         .stride_c = square,
                         .symmetric = true};
  const pg_gemm advance = {.m = rows,
                           .n = columns,
                           .k = n,
                           .alpha = 1,
                           .beta = wide ? 0 : (float)f[0],
                           .a = tall ? c->x : c->p,
                           .b = tall ? c->p : c->x,
                           .c = c->next,
                           .addend = c->x,
                           .lda = tall ? columns : n,
                           .ldb = columns,
                           .ldc = columns,
                           .type_a = c->type,
                           .type_b = c->type,
                           .type_c = c->type,
                           .batch = c->count,
                           .stride_a = tall ? matrix : square,
                           .stride_b = tall ? square : matrix,
                           .stride_c = matrix};
  const pg_view diagonals = {c->p, square, n + 1}; /* [count, n] */
  void *swap = c->x;
  PG_LAUNCH(ctx, gemm, &gram);
  PG_LAUNCH(ctx, gemm, &power);
  if (wide) PG_LAUNCH(ctx, scalar, PG_ADD, diagonals, f[0], false, c->count, n, diagonals);
  PG_LAUNCH(ctx, gemm, &advance);
  c->x = c->next;
  c->next = swap;
fail:
  return status;
}

int pg__polar_factor(pg_context *ctx, pg__polar *c, pg__coefficients set, int steps, double eps) {
  const int64_t n = c->rows * c->columns;
  const pg_view x = pg__matrix_view(c->direction, n), norm = pg__per_row_view(c->norm);
  int status;
  if (!c->measured) PG_LAUNCH(ctx, reduce, PG_NORM, x, c->count, n, 1, c->norm);
  if (sets[set].room != 1)
    PG_LAUNCH(ctx, scalar, PG_MUL, norm, sets[set].room, false, c->count, 1, norm);
  /* The floor keeps a zero matrix from 0/0 when eps is 0. */
  PG_LAUNCH(ctx, scalar, PG_ADD, norm, fmax(eps, FLT_MIN), false, c->count, 1, norm);
  PG_LAUNCH(ctx, binary, PG_DIV, x, norm, c->count, n, x);
  if (c->type != PG_F32) PG_LAUNCH(ctx, convert, PG_F32, c->direction, c->type, c->x, c->count * n);
  for (int k = 0; k < steps; k++)
    PG_TRY(step(ctx, c, sets[set].steps[pg__min(k, sets[set].count - 1)]));
fail:
  return status;
}
