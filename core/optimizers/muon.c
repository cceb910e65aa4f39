/* Muon with the paper's scale. For [rows, columns]:
 *   B <- mu B + G;   X = G + mu B (Nesterov) or B;   X <- X / (||X||_F + eps);
 *   `steps` times  A = X X^T,  X <- a X + (b A + c A A) X      (Jordan et al. 2024);
 *   S = -lr sqrt(max(1, rows/columns)) X.
 * All in fp32. With rows > columns the same iteration runs on the right, A = X^T X and
 * X <- a X + X (b A + c A A), which is the transposed iteration without a transposition. The three
 * terms are folded into P = a I + b A + c A A, so that one product updates X and no copy is kept.
 *
 * Parameters of a group go through batched products, as many at a time as the scratch limit
 * allows. */
#include "compose.h"

#include <float.h>
#include <math.h>

enum { LR, MOMENTUM, NESTEROV, STEPS, EPS, WEIGHT_DECAY };
enum { BUFFER };

/* Scratch of one call, unless a single matrix needs more. Small enough to stay in a CPU's outer
 * cache, large enough to batch small blocks. */
#define SCRATCH_LIMIT ((int64_t)32 << 20)

static const double NS_A = 3.4445, NS_B = -4.7750, NS_C = 2.0315;

/* One chunk's work: `count` matrices, each buffer [count][...] contiguous. */
typedef struct chunk {
  int64_t count, rows, columns, small; /* small = min(rows, columns) */
  float *x, *next;                     /* [count, rows, columns] */
  float *a, *p;                        /* [count, small, small] */
  float *norm;                         /* [1] */
} chunk;

/* B <- mu B + G and x <- direction / (its Frobenius norm + eps), for parameter i of the group. */
static int direction(const pg_increment_group *group, size_t i, const chunk *c, float *x_data) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  int64_t rows = c->rows, columns = c->columns;
  int status = 0;
  pg_view b = pg__matrix_view(group->slots[i][BUFFER], columns);
  pg_view g = pg__input_view(group->gradients[i], columns);
  pg_view x = pg__matrix_view(x_data, columns), d = b, norm = pg__constant_view(c->norm);

  PG_LAUNCH(ctx, scalar, PG_MUL, b, h[MOMENTUM], false, rows, columns, b);
  PG_LAUNCH(ctx, binary, PG_ADD, b, g, rows, columns, b);
  if (h[NESTEROV] != 0) {
    PG_LAUNCH(ctx, scalar, PG_MUL, b, h[MOMENTUM], false, rows, columns, x);
    PG_LAUNCH(ctx, binary, PG_ADD, x, g, rows, columns, x);
    d = x;
  }
  PG_LAUNCH(ctx, reduce, PG_NORM, d, rows, columns, -1, c->norm);
  /* The floor keeps a zero matrix from 0/0 when eps is 0. */
  PG_LAUNCH(ctx, scalar, PG_ADD, norm, fmax(h[EPS], FLT_MIN), false, 1, 1, norm);
  PG_LAUNCH(ctx, binary, PG_DIV, d, norm, rows, columns, x);
fail:
  return status;
}

/* One Newton-Schulz step on all of the chunk: c->next from c->x, then the two change places. */
static int newton_schulz(pg_context *ctx, chunk *c) {
  int64_t rows = c->rows, columns = c->columns, n = c->small;
  int64_t matrix = rows * columns, square = n * n;
  bool tall = rows > columns;
  int status = 0;
  pg_gemm gram = {.transpose_a = tall,
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
                  .batch = c->count,
                  .stride_a = matrix,
                  .stride_b = matrix,
                  .stride_c = square};
  pg_gemm power = {.m = n,
                   .n = n,
                   .k = n,
                   .alpha = (float)NS_C,
                   .beta = (float)NS_B,
                   .a = c->a,
                   .b = c->a,
                   .c = c->p,
                   .lda = n,
                   .ldb = n,
                   .ldc = n,
                   .batch = c->count,
                   .stride_a = square,
                   .stride_b = square,
                   .stride_c = square};
  pg_gemm advance = {.m = rows,
                     .n = columns,
                     .k = n,
                     .alpha = 1,
                     .a = tall ? c->x : c->p,
                     .b = tall ? c->p : c->x,
                     .c = c->next,
                     .lda = tall ? columns : n,
                     .ldb = columns,
                     .ldc = columns,
                     .batch = c->count,
                     .stride_a = tall ? matrix : square,
                     .stride_b = tall ? square : matrix,
                     .stride_c = matrix};
  PG_LAUNCH(ctx, gemm, &gram);
  PG_LAUNCH(ctx, copy, c->p, c->a, (size_t)(c->count * square) * sizeof(float));
  PG_LAUNCH(ctx, gemm, &power);
  for (int64_t i = 0; i < c->count; i++) {
    pg_view diagonal = pg__diagonal_view(c->p + i * square, n);
    PG_LAUNCH(ctx, scalar, PG_ADD, diagonal, NS_A, false, n, 1, diagonal);
  }
  PG_LAUNCH(ctx, gemm, &advance);
  float *swap = c->x;
  c->x = c->next;
  c->next = swap;
fail:
  return status;
}

/* Bytes of one matrix in a chunk, and how many matrices a chunk holds. */
static int64_t chunk_each(const pg_increment_group *group) {
  int64_t small = pg__min(group->rows, group->columns);
  return 2 * (group->rows * group->columns + small * small) * (int64_t)sizeof(float);
}
static int64_t chunk_capacity(const pg_increment_group *group) {
  return pg__min((int64_t)group->count, pg__max(1, SCRATCH_LIMIT / pg__max(1, chunk_each(group))));
}
static int64_t muon_scratch(const pg_increment_group *group) {
  return chunk_capacity(group) * chunk_each(group) + (int64_t)sizeof(float);
}

static int muon_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  int64_t rows = group->rows, columns = group->columns, small = pg__min(rows, columns);
  int64_t matrix = rows * columns, square = small * small;
  int64_t capacity = chunk_capacity(group);
  size_t bytes = (size_t)muon_scratch(group);
  double scale = sqrt(rows > columns ? (double)rows / (double)columns : 1.0);
  void *scratch = NULL;
  int status = 0;

  PG_TRY(pg__alloc(ctx, bytes, "muon's scratch", &scratch));
  for (int64_t first = 0; first < (int64_t)group->count; first += capacity) {
    float *f = scratch;
    chunk c = {.count = pg__min(capacity, (int64_t)group->count - first),
               .rows = rows,
               .columns = columns,
               .small = small};
    c.x = f;
    c.next = c.x + capacity * matrix;
    c.a = c.next + capacity * matrix;
    c.p = c.a + capacity * square;
    c.norm = c.p + capacity * square;
    for (int64_t i = 0; i < c.count; i++)
      PG_TRY(direction(group, (size_t)(first + i), &c, c.x + i * matrix));
    for (int k = 0; k < (int)group->hypers[STEPS]; k++) PG_TRY(newton_schulz(ctx, &c));
    for (int64_t i = 0; i < c.count; i++)
      PG_LAUNCH(ctx, scalar, PG_MUL, pg__matrix_view(c.x + i * matrix, columns), -group->lr * scale,
                false, rows, columns, pg__matrix_view(group->increments[first + i], columns));
  }
fail:
  if (scratch) pg__release(ctx, scratch, bytes);
  return status;
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(8e-3),
    [MOMENTUM] = PG__SHARE("momentum", 0.95, "mu of B <- mu B + G"),
    [NESTEROV] = PG__SWITCH("nesterov", 1, "orthogonalise G + mu B instead of B"),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "Newton-Schulz steps; 0 only normalises"),
    [EPS] = PG__FROM_0("eps", 1e-5, "added to the Frobenius norm"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0.1),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__muon_optimizer;
const pg_optimizer pg__muon_optimizer = {
    .name = "muon",
    .help = "Muon: momentum B <- mu B + G, orthogonalised by Newton-Schulz steps in fp32, S = -lr "
            "sqrt(max(1, rows/columns)) X (Jordan et al. 2024; momentum and scale as in the "
            "paper).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .increment = muon_increment,
    .scratch = muon_scratch,
};
