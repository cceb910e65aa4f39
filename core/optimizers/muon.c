/* Muon with the paper's scale. For [rows, columns]:
 *   B <- mu B + G;   X = G + mu B (Nesterov) or B;   X <- X / (||X||_F + eps);
 *   `steps` Newton-Schulz steps (newton_schulz.h);   S = -lr f X,  f = sqrt(max(1, rows/columns)).
 * average = "mean" keeps M <- mu M + (1-mu) G instead and takes (1-mu) G + mu M or M: another
 * direction only through eps. Other scales: f = sqrt(rows/columns) ("mup"), 0.2 sqrt(max(rows,
 * columns)) ("rms", Liu et al. 2025: the root mean square of AdamW's steps), and <D, X> for the
 * direction D ("nuclear": its nuclear norm, stochastic spectral descent, Carlson et al. 2015).
 *
 * precision = "fp32" is the paper's. "bf16" rounds X, A and b A + c A A to bf16 when they are
 * stored, and every product sums in fp32: a GPU is several times faster at that. Momentum, norm and
 * weights stay in fp32. Newton-Schulz steps forgive it: what they leave of the singular values
 * differs by far more than the rounding (tests/unit/muon_test.c).
 *
 * heads = n > 1 cuts the matrix into n blocks of rows (those of q, k and v belong to one attention
 * head each) or columns (of o), and orthogonalises and scales each by itself (Lau and Su 2026).
 *
 * Parameters of a group go through batched operations, as many at a time as the scratch limit
 * allows: a backbone has hundreds of matrices, and a GPU would spend its time launching. */
#include "newton_schulz.h"

#include <math.h>
#include <stdlib.h>

enum {
  LR,
  MOMENTUM,
  NESTEROV,
  STEPS,
  EPS,
  WEIGHT_DECAY,
  PRECISION,
  AVERAGE,
  COEFFICIENTS,
  SCALE,
  HEADS,
  SPLIT
};
enum { SPLIT_ROWS, SPLIT_COLUMNS };
enum { PRECISION_FP32, PRECISION_BF16 };
enum { AVERAGE_SUM, AVERAGE_MEAN };
enum { SCALE_SPECTRAL, SCALE_MUP, SCALE_RMS, SCALE_NUCLEAR };
enum { BUFFER };

/* Scratch of one call, unless a single matrix needs more. Small enough to stay in a CPU's outer
 * cache, large enough to batch small blocks. */
#define SCRATCH_LIMIT ((int64_t)32 << 20)

static int64_t head_count(const pg_increment_group *group) {
  return pg__max(1, (int64_t)group->hypers[HEADS]);
}
/* Shape of what is orthogonalised. */
static int64_t block_rows(const pg_increment_group *group) {
  return group->hypers[SPLIT] == SPLIT_ROWS ? group->rows / head_count(group) : group->rows;
}
static int64_t block_columns(const pg_increment_group *group) {
  return group->hypers[SPLIT] == SPLIT_COLUMNS ? group->columns / head_count(group)
                                               : group->columns;
}

/* How many matrices a chunk holds. */
static int64_t chunk_capacity(const pg_increment_group *group) {
  const int64_t bytes = pg__polar_bytes(1, group->rows, group->columns);
  return pg__min((int64_t)group->count, pg__max(1, SCRATCH_LIMIT / bytes));
}
/* Of the blocks of one parameter, and that parameter's direction. */
static int64_t split_scratch(const pg_increment_group *group) {
  return pg__polar_bytes(head_count(group), block_rows(group), block_columns(group)) +
         group->rows * group->columns * (int64_t)sizeof(float);
}
static int64_t muon_scratch(const pg_increment_group *group) {
  if (head_count(group) > 1) return split_scratch(group);
  return pg__polar_bytes(chunk_capacity(group), group->rows, group->columns);
}

/* Advance the buffers and write c->direction, of the group from `first` on. */
static int directions(const pg_increment_group *group, float *const *buffers, int64_t first,
                      pg__polar *c) {
  pg_context *ctx = group->context;
  const double mu = group->hypers[MOMENTUM];
  const bool nesterov = group->hypers[NESTEROV] != 0;
  const int64_t n = c->rows * c->columns;
  int status = 0;
  c->measured = group->hypers[AVERAGE] == AVERAGE_SUM;
  if (c->measured)
    PG_LAUNCH(ctx, momentum, mu, nesterov, c->count, group->gradients + first, buffers + first, n,
              c->direction, c->norm);
  else
    for (int64_t i = 0; i < c->count; i++)
      PG_TRY(pg__mean_direction(group, (size_t)(first + i), mu, nesterov, c->direction + i * n));
fail:
  return status;
}

/* X <- <D, X> X / *factor, in fp32. D is made again in `next`, over *factor: nothing has changed
 * since. */
static int by_nuclear_norm(const pg_increment_group *group, float *const *buffers, int64_t first,
                           const pg__polar *c, double *factor) {
  pg_context *ctx = group->context;
  const double mu = group->hypers[MOMENTUM];
  const bool nesterov = group->hypers[NESTEROV] != 0;
  const int64_t n = c->rows * c->columns;
  const pg_view all = pg__matrix_view(c->x, n), next = pg__matrix_view(c->next, n);
  int status;
  *factor = !nesterov ? 1 : group->hypers[AVERAGE] == AVERAGE_SUM ? 1 + mu : 1;
  for (int64_t i = 0; i < c->count; i++) {
    float *d = (float *)c->next + i * n;
    const float *from = nesterov ? group->gradients[first + i] : buffers[first + i];
    PG_LAUNCH(ctx, copy, d, from, (size_t)n * sizeof(float));
    if (nesterov)
      PG_LAUNCH(ctx, lerp, pg__matrix_view(d, n), pg__matrix_view(buffers[first + i], n),
                mu / *factor, 1, n);
  }
  PG_LAUNCH(ctx, binary, PG_MUL, next, all, c->count, n, next);
  PG_LAUNCH(ctx, reduce, PG_SUM, next, c->count, n, 1, c->norm);
  PG_LAUNCH(ctx, binary, PG_MUL, all, pg__per_row_view(c->norm), c->count, n, all);
fail:
  return status;
}

static double shape_scale(int scale, double rows, double columns) {
  if (scale == SCALE_MUP) return sqrt(rows / columns);
  if (scale == SCALE_RMS) return 0.2 * sqrt(fmax(rows, columns));
  return scale == SCALE_NUCLEAR ? 1 : sqrt(fmax(1, rows / columns));
}

/* Block `head` of `whole` to or from its place among the blocks. */
static int move_block(const pg_increment_group *group, float *whole, float *blocks, int64_t head,
                      bool back) {
  pg_context *ctx = group->context;
  const int64_t rows = block_rows(group), columns = block_columns(group);
  const bool by_row = group->hypers[SPLIT] == SPLIT_ROWS;
  const pg_view in = {whole + head * (by_row ? rows * columns : columns), group->columns, 1};
  const pg_view apart = pg__matrix_view(blocks + head * rows * columns, columns);
  int status;
  PG_LAUNCH(ctx, scalar, PG_MUL, back ? apart : in, 1, false, rows, columns, back ? in : apart);
fail:
  return status;
}

/* One parameter, head by head. */
static int muon_split_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t heads = head_count(group), n = group->rows * group->columns;
  const int64_t rows = block_rows(group), columns = block_columns(group), cells = rows * columns;
  const pg_dtype type = h[PRECISION] == PRECISION_BF16 ? PG_BF16 : PG_F32;
  const double scale = shape_scale((int)h[SCALE], (double)rows, (double)columns);
  const bool nuclear = h[SCALE] == SCALE_NUCLEAR;
  pg__polar c = pg__polar_in(memory, heads, rows, columns, type);
  float *whole = memory + pg__polar_bytes(heads, rows, columns) / (int64_t)sizeof(float);
  int status;
  c.count = heads;
  if (h[AVERAGE] == AVERAGE_SUM)
    PG_TRY(pg__sum_direction(group, i, h[MOMENTUM], h[NESTEROV] != 0, whole, c.norm));
  else
    PG_TRY(pg__mean_direction(group, i, h[MOMENTUM], h[NESTEROV] != 0, whole));
  for (int64_t k = 0; k < heads; k++) PG_TRY(move_block(group, whole, c.direction, k, false));
  PG_TRY(pg__polar_factor(ctx, &c, (pg__coefficients)h[COEFFICIENTS], (int)h[STEPS], h[EPS]));
  if (nuclear) {
    const pg_view x = pg__matrix_view(c.x, cells), d = pg__matrix_view(c.next, cells);
    for (int64_t k = 0; k < heads; k++) PG_TRY(move_block(group, whole, c.next, k, false));
    PG_LAUNCH(ctx, binary, PG_MUL, d, x, heads, cells, d);
    PG_LAUNCH(ctx, reduce, PG_SUM, d, heads, cells, 1, c.norm);
    PG_LAUNCH(ctx, binary, PG_MUL, x, pg__per_row_view(c.norm), heads, cells, x);
  }
  if (type != PG_F32) PG_LAUNCH(ctx, convert, type, c.x, PG_F32, c.direction, n);
  for (int64_t k = 0; k < heads; k++)
    PG_TRY(move_block(group, whole, type == PG_F32 ? (float *)c.x : c.direction, k, true));
  PG_TRY(pg__deliver(group, i, -group->lr * scale, whole));
fail:
  return status;
}

/* The options of this group: which go together. */
static int check_options(const pg_increment_group *group) {
  const double *h = group->hypers;
  const int64_t heads = head_count(group);
  const bool by_row = h[SPLIT] == SPLIT_ROWS;
  if (h[PRECISION] != PRECISION_FP32 && h[SCALE] == SCALE_NUCLEAR)
    return pg_fail(group->context, PG_EINVAL,
                   "muon with scale = \"nuclear\" needs precision = \"fp32\", not \"bf16\"");
  if ((by_row ? group->rows : group->columns) % heads != 0)
    return pg_fail(group->context, PG_EINVAL,
                   "muon with heads = %lld cannot split %lld %s: expected a divisor",
                   (long long)heads, (long long)(by_row ? group->rows : group->columns),
                   by_row ? "rows" : "columns");
  return 0;
}

static double muon_factor(const double *hypers, int64_t rows, int64_t columns) {
  const pg_increment_group group = {.hypers = hypers, .rows = rows, .columns = columns};
  return shape_scale((int)hypers[SCALE], (double)block_rows(&group), (double)block_columns(&group));
}

static int muon_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t rows = group->rows, columns = group->columns, count = (int64_t)group->count;
  const int64_t capacity = chunk_capacity(group);
  const size_t bytes = (size_t)muon_scratch(group);
  const pg_dtype type = h[PRECISION] == PRECISION_BF16 ? PG_BF16 : PG_F32;
  const double scale = shape_scale((int)h[SCALE], (double)rows, (double)columns);
  float **buffers = NULL;
  pg_target *targets = NULL;
  void *scratch = NULL;
  int status = 0;

  PG_TRY(check_options(group));
  if (head_count(group) > 1) return pg__each(group, (int64_t)bytes, muon_split_one);
  buffers = calloc(group->count, sizeof *buffers);
  targets = calloc(group->count, sizeof *targets);
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
    pg__polar c = pg__polar_in(scratch, capacity, rows, columns, type);
    double factor = 1;
    c.count = pg__min(capacity, count - first);
    PG_TRY(directions(group, buffers, first, &c));
    PG_TRY(pg__polar_factor(ctx, &c, (pg__coefficients)h[COEFFICIENTS], (int)h[STEPS], h[EPS]));
    if (h[SCALE] == SCALE_NUCLEAR) PG_TRY(by_nuclear_norm(group, buffers, first, &c, &factor));
    PG_LAUNCH(ctx, apply, -group->lr * scale * factor, c.type, c.x, rows * columns, c.count,
              targets + first);
  }
fail:
  if (scratch) pg__release(ctx, scratch, bytes);
  free(buffers);
  free(targets);
  return status;
}

static const char *const splits[] = {"rows", "columns", NULL};
static const char *const averages[] = {"sum", "mean", NULL};
static const char *const coefficients[] = {"quintic", "polar_express", "dion", NULL};
static const char *const scales[] = {"spectral", "mup", "rms", "nuclear", NULL};
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
    [AVERAGE] = PG__CHOICE("average", AVERAGE_SUM, AVERAGE_MEAN, averages,
                           "what the momentum is of gradients: their decayed sum or mean"),
    [COEFFICIENTS] = PG__CHOICE("coefficients", PG__QUINTIC, PG__DION, coefficients,
                                "of the Newton-Schulz steps"),
    [SCALE] = PG__CHOICE("scale", SCALE_SPECTRAL, SCALE_NUCLEAR, scales,
                         "factor of the orthogonal matrix, from the shape or the direction"),
    [HEADS] = {"heads",
               PG_HYPER_INTEGER,
               {1},
               1,
               65536,
               false,
               false,
               NULL,
               "blocks that are orthogonalised and scaled each by itself"},
    [SPLIT] = PG__CHOICE("split", SPLIT_ROWS, SPLIT_COLUMNS, splits,
                         "what the blocks are of: rows for q, k, v, columns for o"),
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
    .factor = muon_factor,
    .increment = muon_increment,
    .scratch = muon_scratch,
};
