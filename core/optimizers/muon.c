/* Muon with the paper's scale. For [rows, columns]:
 *   B <- mu B + G;   X = G + mu B (Nesterov) or B;   X <- X / (||X||_F + eps);
 *   `steps` times  A = X X^T,  X <- a X + (b A + c A A) X      (Jordan et al. 2024);
 *   S = -lr sqrt(max(1, rows/columns)) X.
 * With rows > columns the same iteration runs on the right, A = X^T X and X <- a X + X (b A + c A
 * A), which is the transposed iteration without a transposition.
 *
 * precision = "fp32" is the paper's. "bf16" rounds X, A and b A + c A A to bf16 when they are
 * stored, and every product sums in fp32: a GPU is several times faster at that. Momentum, norm and
 * weights stay in fp32. Newton-Schulz steps forgive it: what they leave of the singular values
 * differs by far more than the rounding (tests/unit/muon_test.c).
 *
 * Parameters of a group go through batched operations, as many at a time as the scratch limit
 * allows: a backbone has hundreds of matrices, and a GPU would spend its time launching. */
#include "compose.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { LR, MOMENTUM, NESTEROV, STEPS, EPS, WEIGHT_DECAY, PRECISION };
enum { PRECISION_FP32, PRECISION_BF16 };
enum { BUFFER };

/* Scratch of one call, unless a single matrix needs more. Small enough to stay in a CPU's outer
 * cache, large enough to batch small blocks. */
#define SCRATCH_LIMIT ((int64_t)32 << 20)

static const double NS_A = 3.4445, NS_B = -4.7750, NS_C = 2.0315;

/* One chunk's work: `count` matrices, each buffer [count][...] contiguous and of `type`. */
typedef struct chunk {
  int64_t count, rows, columns, small; /* small = min(rows, columns) */
  pg_dtype type;
  void *a, *p;      /* [count, small, small] */
  float *direction; /* [count, rows, columns] in fp32: x itself, or what it is rounded from */
  void *x, *next;   /* [count, rows, columns] */
  float *norm;      /* [count] */
} chunk;

/* Bytes of the buffers of one matrix without its norm, in fp32; in bf16 they take no more. */
static int64_t matrix_bytes(const pg_increment_group *group) {
  const int64_t small = pg__min(group->rows, group->columns);
  return 2 * (group->rows * group->columns + small * small) * (int64_t)sizeof(float);
}
/* How many matrices a chunk holds. */
static int64_t chunk_capacity(const pg_increment_group *group) {
  return pg__min((int64_t)group->count, pg__max(1, SCRATCH_LIMIT / matrix_bytes(group)));
}
static int64_t muon_scratch(const pg_increment_group *group) {
  return chunk_capacity(group) * (matrix_bytes(group) + (int64_t)sizeof(float));
}

static chunk chunk_in(void *memory, const pg_increment_group *group, pg_dtype type) {
  const int64_t capacity = chunk_capacity(group), size = (int64_t)pg_dtype_size(type);
  const int64_t small = pg__min(group->rows, group->columns), square = capacity * small * small;
  const int64_t matrix = capacity * group->rows * group->columns;
  char *a = memory, *p = a + square * size, *direction = p + square * size;
  char *x = type == PG_F32 ? direction : direction + matrix * (int64_t)sizeof(float);
  return (chunk){.rows = group->rows,
                 .columns = group->columns,
                 .small = small,
                 .type = type,
                 .a = a,
                 .p = p,
                 .direction = (float *)(void *)direction,
                 .x = x,
                 .next = x + matrix * size,
                 .norm = (float *)(void *)(x + 2 * matrix * size)};
}

/* B <- mu B + G and x <- direction / (its Frobenius norm + eps), of the group from `first` on. */
static int directions(const pg_increment_group *group, float *const *buffers, int64_t first,
                      const chunk *c) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t n = c->rows * c->columns;
  const pg_view x = pg__matrix_view(c->direction, n), norm = pg__per_row_view(c->norm);
  int status;
  PG_LAUNCH(ctx, momentum, h[MOMENTUM], h[NESTEROV] != 0, c->count, group->gradients + first,
            buffers + first, n, c->direction, c->norm);
  /* The floor keeps a zero matrix from 0/0 when eps is 0. */
  PG_LAUNCH(ctx, scalar, PG_ADD, norm, fmax(h[EPS], FLT_MIN), false, c->count, 1, norm);
  PG_LAUNCH(ctx, binary, PG_DIV, x, norm, c->count, n, x);
  if (c->type != PG_F32) PG_LAUNCH(ctx, convert, PG_F32, c->direction, c->type, c->x, c->count * n);
fail:
  return status;
}

/* One Newton-Schulz step on all of the chunk: c->next from c->x, then the two change places. In
 * fp32 `a` is added to the diagonal of b A + c A A, a pass over the small matrix instead of one
 * over X; in bf16 that would round it, and the product adds a X to its sum. */
static int newton_schulz(pg_context *ctx, chunk *c) {
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
                        .stride_c = square};
  const pg_gemm power = {.m = n,
                         .n = n,
                         .k = n,
                         .alpha = (float)NS_C,
                         .beta = (float)NS_B,
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
                         .stride_c = square};
  const pg_gemm advance = {.m = rows,
                           .n = columns,
                           .k = n,
                           .alpha = 1,
                           .beta = wide ? 0 : (float)NS_A,
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
  if (wide) PG_LAUNCH(ctx, scalar, PG_ADD, diagonals, NS_A, false, c->count, n, diagonals);
  PG_LAUNCH(ctx, gemm, &advance);
  c->x = c->next;
  c->next = swap;
fail:
  return status;
}

static int muon_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns, count = (int64_t)group->count;
  const int64_t capacity = chunk_capacity(group);
  const size_t bytes = (size_t)muon_scratch(group);
  const pg_dtype type = group->hypers[PRECISION] == PRECISION_BF16 ? PG_BF16 : PG_F32;
  const double scale = sqrt(rows > columns ? (double)rows / (double)columns : 1.0);
  float **buffers = calloc(group->count, sizeof *buffers);
  pg_target *targets = calloc(group->count, sizeof *targets);
  void *scratch = NULL;
  int status = 0;

  if (!buffers || !targets) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for an update");
    goto fail;
  }
  for (size_t i = 0; i < group->count; i++) {
    buffers[i] = group->slots[i][BUFFER];
    targets[i] = pg__target(group, i);
  }
  PG_TRY(pg__alloc(ctx, bytes, "muon's scratch", &scratch));
  for (int64_t first = 0; first < count; first += capacity) {
    chunk c = chunk_in(scratch, group, type);
    c.count = pg__min(capacity, count - first);
    PG_TRY(directions(group, buffers, first, &c));
    for (int k = 0; k < (int)group->hypers[STEPS]; k++) PG_TRY(newton_schulz(ctx, &c));
    PG_LAUNCH(ctx, apply, -group->lr * scale, c.type, c.x, rows * columns, c.count,
              targets + first);
  }
fail:
  if (scratch) pg__release(ctx, scratch, bytes);
  free(buffers);
  free(targets);
  return status;
}

static const char *const precisions[] = {"fp32", "bf16", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(8e-3),
    [MOMENTUM] = PG__SHARE("momentum", 0.95, "mu of B <- mu B + G"),
    [NESTEROV] = PG__SWITCH("nesterov", 1, "orthogonalise G + mu B instead of B"),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "Newton-Schulz steps; 0 only normalises"),
    [EPS] = PG__FROM_0("eps", 1e-5, "added to the Frobenius norm"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0.1),
    [PRECISION] = {"precision",
                   PG_HYPER_CHOICE,
                   {PRECISION_FP32},
                   0,
                   1,
                   false,
                   false,
                   precisions,
                   "of the Newton-Schulz steps: bf16 operands, sums in fp32 all the same"},
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__muon_optimizer;
const pg_optimizer pg__muon_optimizer = {
    .name = "muon",
    .help = "Muon: momentum B <- mu B + G, orthogonalised by Newton-Schulz steps, S = -lr "
            "sqrt(max(1, rows/columns)) X (Jordan et al. 2024; momentum and scale as in the "
            "paper).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = muon_increment,
    .scratch = muon_scratch,
};
