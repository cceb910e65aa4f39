/* One declaration per operation; each backend defines all of them and lists them in one table.
 *
 * Conventions, which hold unless an operation says otherwise:
 *  - A queue orders the work. Kernels may return before the work is done; `download` and
 *    `synchronize` wait for it. The CPU backend is finished on return.
 *  - Pointers are device memory, row-major, and not checked: the core checked shapes and types.
 *    Outputs do not overlap inputs unless "in place" is said.
 *  - Sizes and offsets are 64-bit. N = batch * time is a number of positions.
 *  - A kernel returns 0, or -1 after leaving a text in the queue (`message`).
 *  - Same inputs, thread count and machine: same bits.
 * The CPU definition of an operation is its specification. */
#ifndef PG_KERNELS_H
#define PG_KERNELS_H

#include "dtype.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pg_queue pg_queue;

/* ---- memory ---------------------------------------------------------------------------- */
/* 64-byte aligned device memory; *out is NULL on failure: -1 when there is no room, -2 when the
 * device does not work. */
typedef int pg_alloc_fn(pg_queue *q, size_t bytes, void **out);
typedef void pg_release_fn(pg_queue *q, void *memory);
typedef int pg_upload_fn(pg_queue *q, void *device, const void *host, size_t bytes);
/* An upload beside the queue's work: it waits for what was queued before the last `join` only, and
 * runs while later work does. So nothing that was queued since then may use `device`, which is no
 * memory allocated since then either. Work queued after the next `join` finds what it brought, and
 * before that join the memory is not released. The source was read on return. */
typedef int pg_upload_beside_fn(pg_queue *q, void *device, const void *host, size_t bytes);
typedef int pg_join_fn(pg_queue *q);
typedef int pg_download_fn(pg_queue *q, void *host, const void *device, size_t bytes); /* waits */
typedef int pg_copy_fn(pg_queue *q, void *to, const void *from, size_t bytes);
typedef int pg_zero_fn(pg_queue *q, void *memory, size_t bytes);
typedef int pg_synchronize_fn(pg_queue *q);
/* What the queue runs on. Sizes in bytes; free and total are 0 where the system alone knows, the
 * cache is the last level or 0 when unknown. */
typedef struct pg_device_info {
  char name[128]; /* "NVIDIA H200, sm_90" or the CPU level */
  int count;      /* devices of this backend that the process sees */
  int64_t memory_free, memory_total, cache_bytes;
} pg_device_info;
typedef int pg_device_info_fn(pg_queue *q, pg_device_info *out);
/* Note the time when the work queued so far is done, as time stamp `index` (0, 1, … in order; 0
 * starts anew). Does not wait. */
typedef int pg_timestamp_fn(pg_queue *q, int64_t index);
/* seconds[i] = from time stamp 0 to i, for i < count. Waits. */
typedef int pg_elapsed_fn(pg_queue *q, int64_t count, double *seconds);
/* Multiply-adds from registers alone on all arithmetic units for about 10 ms; *flops = how many
 * operations that were, 0 when the backend has no such loop for this type. Waits. */
typedef int pg_peak_fn(pg_queue *q, pg_dtype type, double *flops);

/* Operations to come: passes of `batch` sequences over a vocabulary of `rows`, reductions of
 * matrices of at most [rows, columns], and the diameter of [rows, cloud_columns], 0: none. */
typedef struct pg_workload {
  pg_dtype type;
  int64_t batch, time, heads, head_dim;
  int64_t rows, columns, cloud_columns;
} pg_workload;
/* *bytes: what `held` (below) will be at most while the work is done. */
typedef int pg_workspace_fn(pg_queue *q, const pg_workload *work, int64_t *bytes);

/* ---- dense products -------------------------------------------------------------------- */
/* C = alpha * op(A) op(B) + beta * D with op(A) [m,k], op(B) [k,n], C [m,n], all row-major with
 * leading dimensions in elements, `batch` times at the given strides (batch 0 counts as 1). D, the
 * addend, lies as C does and may be C or share no element with it; beta = 0 never reads it.
 * `symmetric` promises that op(B) is the transpose of op(A), element for element, and D symmetric:
 * a backend may then compute half of C and mirror it. Accumulation in fp32 or better; no TF32.
 * Types: all PG_F32; or A and B PG_BF16 with C and D PG_F32 or PG_BF16 (rounded once, after beta *
 * D was added). */
typedef struct pg_gemm {
  bool transpose_a, transpose_b;
  int64_t m, n, k;
  float alpha, beta;
  const void *a, *b;
  void *c;
  const void *addend; /* NULL: C */
  int64_t lda, ldb, ldc;
  pg_dtype type_a, type_b, type_c;
  int64_t batch, stride_a, stride_b, stride_c;
  bool symmetric;
} pg_gemm;
typedef int pg_gemm_fn(pg_queue *q, const pg_gemm *g);

/* ---- transformer ----------------------------------------------------------------------- */
/* Activations have the compute type `type`, PG_F32 or PG_BF16: operands of products and the
 * residual stream are rounded to it when they are stored; everything inside a kernel, and every
 * statistic, is fp32. */

/* out[i,:] = weight[tokens[i],:] for i < n; weight [V,d] in `type`. Tokens were validated. */
typedef int pg_embedding_forward_fn(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                                    const void *weight, int64_t d, void *out);
/* dweight[tokens[i],:] += dout[i,:], each row summed in increasing i (no atomics); dweight fp32. */
typedef int pg_embedding_backward_fn(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                                     const void *dout, int64_t d, int64_t vocab, float *dweight);

/* y = x * r, r = 1/sqrt(mean(x^2) + eps), per row of [n,d]; rstd[n] keeps r (may be NULL). */
typedef int pg_rmsnorm_forward_fn(pg_queue *q, pg_dtype type, const void *x, int64_t n, int64_t d,
                                  float eps, void *y, float *rstd);
/* dx += r * (dy - x * r^2 * mean(dy . x)). With `add` false dx is overwritten. */
typedef int pg_rmsnorm_backward_fn(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                   const float *rstd, int64_t n, int64_t d, bool add, void *dx);

/* Heads of one position lie side by side: x [batch*time, heads*head_dim]. Each head vector is
 * RMS-normalised, then rotated half-split: with (l, r) its halves, (l c - r s, r c + l s), where
 * c, s = cosine/sine[time, head_dim/2]. Position of row i is i % time. rstd [batch*time, heads]. */
typedef int pg_qk_norm_rope_forward_fn(pg_queue *q, pg_dtype type, const void *x, int64_t batch,
                                       int64_t time, int64_t heads, int64_t head_dim, float eps,
                                       const float *cosine, const float *sine, void *y,
                                       float *rstd);
/* dx (overwritten) from dy; x and rstd are the forward input and statistics. In place dx == dy. */
typedef int pg_qk_norm_rope_backward_fn(pg_queue *q, pg_dtype type, const void *dy, const void *x,
                                        const float *rstd, int64_t batch, int64_t time,
                                        int64_t heads, int64_t head_dim, const float *cosine,
                                        const float *sine, void *dx);

/* Causal attention, scale 1/sqrt(head_dim); q, k, v, out [batch*time, heads*head_dim] in `type`;
 * lse [batch, heads, time] keeps log-sum-exp of the scaled scores. Never stores time x time for
 * all heads. Probabilities may be rounded to `type` before they meet the values. */
typedef int pg_attention_forward_fn(pg_queue *q, pg_dtype type, const void *query, const void *key,
                                    const void *value, int64_t batch, int64_t time, int64_t heads,
                                    int64_t head_dim, void *out, float *lse);
/* dquery, dkey, dvalue (overwritten) from dout. */
typedef int pg_attention_backward_fn(pg_queue *q, pg_dtype type, const void *dout,
                                     const void *query, const void *key, const void *value,
                                     const void *out, const float *lse, int64_t batch, int64_t time,
                                     int64_t heads, int64_t head_dim, void *dquery, void *dkey,
                                     void *dvalue);

/* Which implementation such calls take and why, as one line of text; empty where there is one only.
 * Loads and prepares what they need. -1 where none can take them, or where PG_ATTENTION in the
 * environment asks for one that cannot run. The choice depends on the machine and the shape alone.
 */
typedef int pg_attention_path_fn(pg_queue *q, pg_dtype type, int64_t batch, int64_t time,
                                 int64_t heads, int64_t head_dim, char *text, size_t size);

/* y = silu(gate) * up, element-wise over n. */
typedef int pg_swiglu_forward_fn(pg_queue *q, pg_dtype type, const void *gate, const void *up,
                                 int64_t n, void *y);
/* dgate, dup (overwritten) from dy. In place dgate == gate or dup == up is allowed. */
typedef int pg_swiglu_backward_fn(pg_queue *q, pg_dtype type, const void *dy, const void *gate,
                                  const void *up, int64_t n, void *dgate, void *dup);

/* Rows of fp32 logits [n, vocab] with leading dimension ld are scaled by logit_scale, then
 * loss[i] = logsumexp(z_i) - z_i[target_i]. With `gradient` the logits are replaced in place by
 * (softmax(z) - onehot) * scale * logit_scale, the derivative of scale * sum(loss) to the unscaled
 * logits, in `type`: row i starts where it was, so in BF16 the leading dimension is 2 ld elements.
 * Columns from vocab to ld are neither read nor written. */
typedef int pg_cross_entropy_fn(pg_queue *q, pg_dtype type, float *logits, int64_t n, int64_t vocab,
                                int64_t ld, const int32_t *targets, float logit_scale, float scale,
                                bool gradient, float *loss);
/* out[i] = max_j z_ij - min_j z_ij over j < vocab. */
typedef int pg_row_range_fn(pg_queue *q, const float *z, int64_t n, int64_t vocab, int64_t ld,
                            float *out);

/* ---- sums, norm and clip --------------------------------------------------------------- */
/* *out = sum of x (or of x^2) in fp64 over fixed blocks, independent of the thread count. */
typedef int pg_sum_fn(pg_queue *q, const float *x, int64_t n, bool square, double *out);
/* From `count` sums of squares: norm = sqrt(sum), factor = min(1, max_norm / (norm + 1e-6)), or 1
 * when max_norm is infinite; finite = 0 if norm is not finite. The result stays on the device. */
typedef struct pg_clip {
  double norm;
  float factor;
  int32_t finite;
} pg_clip;
typedef int pg_clip_factor_fn(pg_queue *q, const double *sums, int64_t count, double max_norm,
                              pg_clip *out);
/* x *= clip->factor, when it is not 1 and clip->finite. */
typedef int pg_clip_apply_fn(pg_queue *q, const pg_clip *clip, int64_t n, float *x);

/* ---- optimizers ------------------------------------------------------------------------ */
/* Where the increments s of n weights go: into `increment` unless it is NULL, and onto the weights
 * `value` unless that is NULL:  w <- keep w + s,  keep = 1 - lr * decay computed in fp64 and
 * rounded once, one rounding of the product and one of the sum, no contraction. With `cautious`
 * only weights that s moves towards zero (s w < 0) decay, the others are w + s. `copy`, when not
 * NULL, receives w rounded to bf16. So decay, addition and the compute copy cost no pass of their
 * own, and an increment that nobody keeps is never stored. */
typedef struct pg_target {
  float *increment, *value;
  uint16_t *copy;
  double keep;
  bool cautious;
} pg_target;
/* s = (float)factor * x in fp32, `count` times: n numbers of `type` from x + i * n on to to[i]. */
typedef int pg_apply_fn(pg_queue *q, double factor, pg_dtype type, const void *x, int64_t n,
                        int64_t count, const pg_target *to);
/* m <- b1 m + (1-b1) g; v <- b2 v + (1-b2) g^2;
 * s = -lr * (m * correction1) / (sqrt(v * correction2) + eps), correctionK = 1/(1-bK^n). */
typedef struct pg_adamw {
  double lr, beta1, beta2, eps, correction1, correction2;
} pg_adamw;
typedef int pg_adamw_fn(pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m,
                        float *v, const pg_target *to);
/* b <- beta b + (1-beta) g, as pg_lerp(b, g, 1-beta); with g NULL b [rows, columns] is taken as it
 * is, and may be the target's increment. Then s_i = b_i / (||b_i|| + offset) * -lr for each row,
 * rounded after every operation, the norm as PG_NORM of pg_reduce. */
typedef struct pg_rownorm {
  double lr, beta, offset;
} pg_rownorm;
typedef int pg_rownorm_fn(pg_queue *q, const pg_rownorm *h, const float *g, int64_t rows,
                          int64_t columns, float *b, const pg_target *to);
/* b <- mu b + g for `count` matrices of n numbers. Unless x is NULL, x + i * n receives their
 * direction, mu b_i + g_i if `nesterov` and b_i if not, and norm[i] its length, as PG_NORM of all
 * by pg_reduce. One rounding per operation. */
typedef int pg_momentum_fn(pg_queue *q, double mu, bool nesterov, int64_t count,
                           const float *const *g, float *const *b, int64_t n, float *x,
                           float *norm);
/* out(i,j) = 1 or -1 for [rows, columns]: the codes of rows first, first + 1, ... under (seed,
 * stream). Bit j % 128 of Philox 4x32-10 (philox.h) at index (first + i) * ceil(columns/128) +
 * j/128 decides, -1 where it is set; bit b is bit b % 32 of word b / 32. */
typedef int pg_signs_fn(pg_queue *q, uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
                        int64_t columns, float *out);
/* to <- from in another type (F32 to BF16 rounds to nearest even). */
typedef int pg_convert_fn(pg_queue *q, pg_dtype from_type, const void *from, pg_dtype to_type,
                          void *to, int64_t n);

/* ---- element-wise operations, reductions: Lua tensors and optimizers --------------------- */
typedef enum pg_binary_op {
  PG_ADD,
  PG_SUB,
  PG_MUL,
  PG_DIV,
  PG_MIN,
  PG_MAX,
  PG_POW,
  PG_LT,
  PG_LE,
  PG_GT,
  PG_GE,
  PG_EQ,
  PG_NE,    /* comparisons give 1 or 0 */
  PG_MASKED /* a where b is not 0, else -0, which changes nothing that it is added to */
} pg_binary_op;
typedef enum pg_unary_op {
  PG_NEG,
  PG_ABS,
  PG_SQRT,
  PG_SQUARE,
  PG_EXP,
  PG_LOG,
  PG_SIGN,
  PG_RECIPROCAL,
  PG_TANH,
  PG_ISFINITE,
  PG_FLOOR,
  PG_CEIL,
  PG_ROUND /* to the nearest, halves to even */
} pg_unary_op;
typedef enum pg_reduce_op {
  PG_SUM,
  PG_MEAN,
  PG_RMAX,
  PG_RMIN,
  PG_NORM,
  PG_ARGMAX,
  PG_ARGMIN /* args give 0-based indices */
} pg_reduce_op;
/* A matrix view: element (i,j) at data[i*row_stride + j*column_stride]; stride 0 broadcasts. */
typedef struct pg_view {
  float *data;
  int64_t row_stride, column_stride;
} pg_view;
/* out(i,j) = a(i,j) op b(i,j) in fp32, for [rows, columns]. out may be a or b. */
typedef int pg_binary_fn(pg_queue *q, pg_binary_op op, pg_view a, pg_view b, int64_t rows,
                         int64_t columns, pg_view out);
/* out = a op (float)scalar, or with `reversed` (float)scalar op a. */
typedef int pg_scalar_fn(pg_queue *q, pg_binary_op op, pg_view a, double scalar, bool reversed,
                         int64_t rows, int64_t columns, pg_view out);
typedef int pg_unary_fn(pg_queue *q, pg_unary_op op, pg_view a, int64_t rows, int64_t columns,
                        pg_view out);
/* x <- (float)(1-w) x + (float)w y, two roundings per product and one per sum, no contraction. */
typedef int pg_lerp_fn(pg_queue *q, pg_view x, pg_view y, double w, int64_t rows, int64_t columns);
/* Reduce each row (axis 1, out[rows]), each column (axis 0, out[columns]) or all (axis -1, out[1]).
 * Sums and squares accumulate in fp64 in a fixed order, rounded once. NaN propagates. */
typedef int pg_reduce_fn(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                         int axis, float *out);

/* ---- geometry -------------------------------------------------------------------------- */
/* y = x - mean row (mean in fp64); y may be x. */
typedef int pg_center_rows_fn(pg_queue *q, const float *x, int64_t rows, int64_t columns, float *y);
/* The farthest pair of rows of x [rows, columns], exactly: see kernels/cpu/diameter.c. Waits.
 * value = max ||x_i - x_j|| evaluated in fp64 on x itself, first/second 0-based with first <
 * second, smallest pair among ties; both -1 when value is 0. radius = max ||x_i - mean row|| in
 * fp64, so that radius <= value <= 2 radius but for rounding. bad_row >= 0: a row is not finite
 * (nothing else is set). *cancel is polled. */
typedef struct pg_farthest {
  double value;
  int64_t first, second, bad_row;
  double multiply_adds, radius;
} pg_farthest;
typedef int pg_diameter_fn(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                           const volatile int *cancel, pg_farthest *out);
/* The nearest pair in the same way: value = min ||x_i - x_j||, which may be 0. Without two rows
 * there is no pair, -1 and -1. */
typedef int pg_separation_fn(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                             const volatile int *cancel, pg_farthest *out);

/* ---- the table ------------------------------------------------------------------------- */
/* What an operation costs at least is in cost.c, in the same order; core/bench_kernels.c times it.
 */
/* clang-format off */
#define PG_KERNELS(X)                                                                              \
  X(alloc) X(release) X(upload) X(upload_beside) X(join) X(download) X(copy) X(zero)               \
  X(synchronize) X(device_info) X(timestamp) X(elapsed) X(peak) X(workspace)                       \
  X(gemm) X(embedding_forward) X(embedding_backward) X(rmsnorm_forward) X(rmsnorm_backward)        \
  X(qk_norm_rope_forward) X(qk_norm_rope_backward) X(attention_forward) X(attention_backward)      \
  X(attention_path) X(swiglu_forward) X(swiglu_backward) X(cross_entropy) X(row_range)             \
  X(sum) X(clip_factor) X(clip_apply) X(apply) X(adamw) X(rownorm) X(momentum) X(signs) X(convert) \
  X(binary) X(scalar) X(unary) X(lerp) X(reduce) X(center_rows) X(diameter) X(separation)
/* clang-format on */

typedef struct pg_queue_options {
  int threads; /* CPU threads of this process's share */
  int device;  /* index among the backend's devices */
} pg_queue_options;

typedef struct pg_kernels {
  const char *name; /* "cpu", "cuda" */
  /* -1 with a text in message[size] when the device is missing or refuses. */
  int (*queue_new)(const pg_queue_options *options, pg_queue **out, char *message, size_t size);
  void (*queue_free)(pg_queue *q);
  const char *(*message)(const pg_queue *q);
  /* Bytes of device memory that the backend holds for itself, beside what `alloc` gave: workspace,
   * scratch, and what an operation takes while it runs. The most since the last call of this
   * function, which then starts anew from what is held now. */
  int64_t (*held)(pg_queue *q);
#define PG_KERNEL_FIELD(op) pg_##op##_fn *op;
  PG_KERNELS(PG_KERNEL_FIELD)
#undef PG_KERNEL_FIELD
} pg_kernels;

/* The CPU backend is compiled for several CPU levels. The best that this CPU runs, or the one named
 * by `level`; NULL when that one is unknown or cannot run here. */
const pg_kernels *pg_cpu_kernels(const char *level);
/* The levels' names, the plainest first: "base", "avx2", "avx512" and "amx", which is AVX-512 with
 * products of bf16 on tiles. */
#define PG_CPU_LEVELS 4
extern const char *const pg_cpu_levels[PG_CPU_LEVELS];
/* The name of this table of the CPU backend; "unknown" of others. */
const char *pg_cpu_level(const pg_kernels *kernels);
/* The CUDA backend is a plugin (perigee_cuda.so, in the folder of the program or module, or in
 * LIBDIR/perigee) that exports this one function; core/context.c loads it when first needed. */
const pg_kernels *pg_cuda_kernels(void);
#define PG_CUDA_PLUGIN "perigee_cuda.so"
extern const pg_kernels pg_cpu_base_kernels, pg_cpu_avx2_kernels, pg_cpu_avx512_kernels,
    pg_cpu_amx_kernels;

#endif
