/* RowNorm's directions at lengths of their own: a feasible step under a diameter budget that never
 * decreases less, to first order, than RowNorm's. With M the mean of gradients, M <- beta M +
 * (1-beta) G, rows in falling order of ||m_i|| and u_i their directions, lengths come from a greedy
 * pass: phi_1 = r0 u_1, and then
 *   phi_i = t_i u_i,  t_i = min(r0, min_{j<i} c_ij + sqrt(c_ij^2 + 1 - t_j^2)),  c_ij = <u_i,
 * phi_j>, the largest with ||phi_i - phi_j|| <= 1 to all before; 0 at least. r0 = 1/2 makes every
 * t_i = 1/2, which is RowNorm. Of r0 = .5, .55, .6 and .65 the one with the largest sum of t_i
 * ||m_i|| counts: s_i = -2 lr t_i m_i / (||m_i|| + eps (1-beta^n)),   D(S) <= 2 lr. Rounding moves
 * D by (columns + 4) 2^-24 of that at most. rescale = true multiplies S so that D(S) = 2 lr, at the
 * cost of an exact diameter.
 *
 * A pass costs rows^2 columns / 2 multiply-adds and some 20 rows^2 element-wise operations: a
 * minute on a laptop at 50257 x 512, well below a second on a GPU. Rows go in blocks: a block's
 * products with all rows before it are the device's work, for all r0 at once; within the block the
 * host goes from row to row, on their products with each other. */
#include "compose.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { LR, BETA, EPS, WEIGHT_DECAY, RESCALE };
enum { BUFFER };

static const double radii[] = {0.55, 0.6, 0.65}; /* beside 0.5 */
enum { RADII = 3 };

#define BLOCK_LIMIT ((int64_t)128 << 20) /* bytes of a block's products */

static int64_t block_rows(int64_t rows) {
  const int64_t fit = BLOCK_LIMIT / (3 * rows * (int64_t)sizeof(float));
  return pg__min(rows, pg__max(16, pg__min(512, fit)));
}

/* Device memory of one parameter's pass. */
typedef struct pass {
  float *x, *sorted;             /* [rows, columns]: directions, and in order of length */
  float *products, *c, *root;    /* [block, rows] with the rows before */
  float *own;                    /* [block, block] within */
  float *least;                  /* [block] */
  float *t[RADII], *rest[RADII]; /* [rows] each: t, 1 - t^2 */
  float *length;                 /* [rows]; later the factors */
  int32_t *order;                /* [rows] */
} pass;

static int64_t own_bytes(const pg_increment_group *group) {
  const int64_t rows = group->rows, block = block_rows(rows);
  return (2 * rows * group->columns + 3 * block * rows + block * block + block +
          (2 + 2 * RADII) * rows) *
         (int64_t)sizeof(float);
}

static float *take(float **memory, int64_t n) {
  float *at = *memory;
  *memory += n;
  return at;
}

static void divide(pass *p, float *memory, int64_t rows, int64_t columns) {
  const int64_t block = block_rows(rows);
  *p = (pass){0};
  p->x = take(&memory, rows * columns);
  p->sorted = take(&memory, rows * columns);
  p->products = take(&memory, block * rows);
  p->c = take(&memory, block * rows);
  p->root = take(&memory, block * rows);
  p->own = take(&memory, block * block);
  p->least = take(&memory, block);
  p->length = take(&memory, rows);
  for (int k = 0; k < RADII; k++) p->t[k] = take(&memory, rows), p->rest[k] = take(&memory, rows);
  p->order = (int32_t *)take(&memory, rows);
}

static int64_t greedy_radial_scratch(const pg_increment_group *group) {
  return own_bytes(group) + (group->hypers[RESCALE] != 0 ? pg__budget_bytes(group) : 0);
}

/* Host memory. */
typedef struct entry {
  float length;
  int32_t row;
} entry;
typedef struct plan {
  entry *rows;            /* by falling length */
  int64_t count;          /* of those that are not 0 */
  float *t[RADII], *rest; /* in that order */
  float *own, *least;     /* [block, block], [RADII, block] */
  float *length;
  int32_t *order;
} plan;

static int longest_first(const void *a, const void *b) {
  const entry *x = a, *y = b;
  if (x->length != y->length) return x->length > y->length ? -1 : 1;
  return (x->row > y->row) - (x->row < y->row);
}

static void plan_free(plan *h) {
  for (int k = 0; k < RADII; k++) free(h->t[k]);
  free(h->rows), free(h->rest), free(h->own), free(h->least), free(h->length), free(h->order);
}

static int plan_new(pg_context *ctx, int64_t rows, plan *h) {
  const size_t n = (size_t)rows, block = (size_t)block_rows(rows);
  bool full = true;
  *h = (plan){.rows = malloc(n * sizeof *h->rows),
              .rest = malloc(n * sizeof(float)),
              .own = malloc(block * block * sizeof(float)),
              .least = malloc(RADII * block * sizeof(float)),
              .length = malloc(n * sizeof(float)),
              .order = malloc(n * sizeof(int32_t))};
  for (int k = 0; k < RADII; k++) full = (h->t[k] = malloc(n * sizeof(float))) && full;
  if (full && h->rows && h->rest && h->own && h->least && h->length && h->order) return 0;
  return pg_fail(ctx, PG_ENOMEM, "out of memory for the order of %lld rows", (long long)rows);
}

/* least[k][i] = min over the rows j < first of c_ij + sqrt(c_ij^2 + 1 - t_j^2), on the host. */
static int before_block(pg_context *ctx, const pass *p, plan *h, int64_t first, int64_t n,
                        int64_t columns) {
  const pg_view products = pg__matrix_view(p->products, first), c = pg__matrix_view(p->c, first);
  const pg_view root = pg__matrix_view(p->root, first);
  const pg_gemm g = {.transpose_b = true,
                     .m = n,
                     .n = first,
                     .k = columns,
                     .alpha = 1,
                     .a = p->sorted + first * columns,
                     .b = p->sorted,
                     .c = p->products,
                     .lda = columns,
                     .ldb = columns,
                     .ldc = first};
  int status = 0;
  for (int64_t i = 0; first == 0 && i < RADII * n; i++) h->least[i] = HUGE_VALF;
  if (first == 0) return 0;
  PG_LAUNCH(ctx, gemm, &g);
  for (int k = 0; k < RADII; k++) {
    const pg_view t = {p->t[k], 0, 1}, rest = {p->rest[k], 0, 1};
    PG_LAUNCH(ctx, binary, PG_MUL, products, t, n, first, c);
    PG_LAUNCH(ctx, binary, PG_MUL, c, c, n, first, root);
    PG_LAUNCH(ctx, binary, PG_ADD, root, rest, n, first, root);
    PG_LAUNCH(ctx, unary, PG_SQRT, root, n, first, root);
    PG_LAUNCH(ctx, binary, PG_ADD, c, root, n, first, c);
    PG_LAUNCH(ctx, reduce, PG_RMIN, c, n, first, 1, p->least);
    PG_LAUNCH(ctx, download, h->least + k * n, p->least, (size_t)n * sizeof(float));
  }
fail:
  return status;
}

/* t of rows [first, first + n) for every r0, on the host and the device. */
static int radii_of_block(pg_context *ctx, const pass *p, plan *h, int64_t first, int64_t n,
                          int64_t columns) {
  const pg_gemm g = {.transpose_b = true,
                     .m = n,
                     .n = n,
                     .k = columns,
                     .alpha = 1,
                     .a = p->sorted + first * columns,
                     .b = p->sorted + first * columns,
                     .c = p->own,
                     .lda = columns,
                     .ldb = columns,
                     .ldc = n};
  int status;
  PG_TRY(before_block(ctx, p, h, first, n, columns));
  PG_LAUNCH(ctx, gemm, &g);
  PG_LAUNCH(ctx, download, h->own, p->own, (size_t)(n * n) * sizeof(float));
  for (int k = 0; k < RADII; k++) {
    float *t = h->t[k] + first;
    for (int64_t i = 0; i < n; i++) {
      double most = fmin(radii[k], (double)h->least[k * n + i]);
      for (int64_t j = 0; j < i; j++) {
        const double c = (double)h->own[i * n + j] * (double)t[j];
        most = fmin(most, c + sqrt(c * c + 1 - (double)t[j] * (double)t[j]));
      }
      t[i] = (float)fmax(most, 0);
      h->rest[i] = (float)(1 - (double)t[i] * (double)t[i]);
    }
    PG_LAUNCH(ctx, upload, p->t[k] + first, t, (size_t)n * sizeof(float));
    PG_LAUNCH(ctx, upload, p->rest[k] + first, h->rest, (size_t)n * sizeof(float));
  }
fail:
  return status;
}

/* length[row] <- 2 t ||m|| / (||m|| + offset) of the best r0; t = 1/2 where none is better. */
static void choose(plan *h, int64_t rows, double offset) {
  int best = -1;
  double most = 0;
  for (int k = -1; k < RADII; k++) {
    double sum = 0;
    for (int64_t i = 0; i < h->count; i++) {
      const double a = (double)h->rows[i].length;
      sum += (k < 0 ? 0.5 : (double)h->t[k][i]) * a * (a / (a + offset));
    }
    if (k < 0 || sum > most) most = sum, best = k;
  }
  for (int64_t i = 0; i < rows; i++) {
    const double a = (double)h->rows[i].length;
    h->length[h->rows[i].row] =
        i < h->count ? (float)(2 * (best < 0 ? 0.5 : (double)h->t[best][i]) * (a / (a + offset)))
                     : 0;
  }
}

static int greedy_radial_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *hyper = group->hypers;
  const int64_t rows = group->rows, columns = group->columns, block = block_rows(rows);
  const double offset =
      fmax(hyper[EPS] * pg__bias_correction(hyper[BETA], group->updates[i]), DBL_MIN);
  pass p;
  plan h = {0};
  int status;
  divide(&p, memory, rows, columns);
  const pg_view x = pg__matrix_view(p.x, columns), length = pg__per_row_view(p.length);
  PG_TRY(plan_new(ctx, rows, &h));
  PG_TRY(pg__mean_direction(group, i, hyper[BETA], false, p.x));
  PG_LAUNCH(ctx, reduce, PG_NORM, x, rows, columns, 1, p.length);
  PG_LAUNCH(ctx, download, h.length, p.length, (size_t)rows * sizeof(float));
  PG_LAUNCH(ctx, scalar, PG_MAX, length, FLT_MIN, false, rows, 1, length);
  PG_LAUNCH(ctx, binary, PG_DIV, x, length, rows, columns, x);
  for (int64_t r = 0; r < rows; r++) h.rows[r] = (entry){h.length[r], (int32_t)r};
  qsort(h.rows, (size_t)rows, sizeof *h.rows, longest_first);
  while (h.count < rows && h.rows[h.count].length > 0) h.count++;
  for (int64_t r = 0; r < rows; r++) h.order[r] = h.rows[r].row;
  PG_LAUNCH(ctx, upload, p.order, h.order, (size_t)rows * sizeof(int32_t));
  PG_LAUNCH(ctx, embedding_forward, PG_F32, p.order, h.count, p.x, columns, p.sorted);
  for (int64_t first = 0; first < h.count; first += block)
    PG_TRY(radii_of_block(ctx, &p, &h, first, pg__min(block, h.count - first), columns));
  choose(&h, rows, offset);
  PG_LAUNCH(ctx, upload, p.length, h.length, (size_t)rows * sizeof(float));
  PG_LAUNCH(ctx, binary, PG_MUL, x, length, rows, columns, x);
  if (hyper[RESCALE] != 0) PG_TRY(pg__use_budget(group, 2, p.x));
  PG_TRY(pg__deliver(group, i, -group->lr, p.x));
fail:
  plan_free(&h);
  return status;
}

static int greedy_radial_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, own_bytes(group), greedy_radial_one);
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "added to the norm of a bias-corrected row"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
    [RESCALE] = PG__SWITCH("rescale", 0, "to D(S) = 2 lr, by an exact diameter per update"),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__greedy_radial_optimizer;
const pg_optimizer pg__greedy_radial_optimizer = {
    .name = "greedy_radial",
    .help = "RowNorm's directions with lengths from a greedy pass over rows of falling ||m_i||, "
            "each as long as at most 2 lr from all before it allows; the best of four starts, of "
            "which one is RowNorm. At most 2 lr between two rows; costs rows^2 columns / 2 "
            "multiply-adds.",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = greedy_radial_increment,
    .scratch = greedy_radial_scratch,
};
