/* The model's and the activations' fields, shared by the files of the transformer: model.c,
 * model_file.c, activations.c, block.c, forward.c, head.c. */
#ifndef PG_MODEL_INTERNAL_H
#define PG_MODEL_INTERNAL_H

#include "internal.h"
#include "model.h"

/* A block's matrices, in the order of its parameters. */
typedef enum pg_block_matrix {
  PG_Q,
  PG_K,
  PG_V,
  PG_O,
  PG_GATE,
  PG_UP,
  PG_DOWN,
  PG_BLOCK_MATRICES
} pg_block_matrix;

struct pg_model {
  pg_context *context;
  pg_model_config config;
  pg_tensor *weights; /* one allocation; every value is a view of it */
  pg_tensor *copies;  /* the same in bf16; NULL in fp32 */
  /* Orthonormal rows that span what the backward pass keeps, [backward_rank, width], and their
   * copy; NULL: all of it is kept */
  pg_tensor *basis, *basis_copy;
  pg_dtype compute;
  size_t count;
  pg_parameter *parameters; /* embedding, blocks, head: B before A where it is A B */
};

/* What a block's backward pass reads, N = batch * time positions, d = width, D = heads * head_dim,
 * F = mlp. Tensors are in the compute type, statistics are fp32. Where only the inputs are kept all
 * blocks share the rest; where nothing is kept they share everything, with input == middle: the
 * residual stream is then updated in place. */
typedef struct pg_block_buffers {
  void *input;         /* [N, d] residual stream before the block; output: the next one's input */
  void *middle;        /* [N, d] after attention */
  void *q_raw, *k_raw; /* [N, D] before norm and rotation */
  void *q, *k, *v;     /* [N, D] as attention reads them */
  void *attended;      /* [N, D] */
  void *gate, *up;     /* [N, F]; the backward pass replaces them by their gradients */
  void *product;       /* [N, F] silu(gate) up */
  float *input_rstd, *middle_rstd; /* [N] */
  float *q_rstd, *k_rstd;          /* [N, heads] */
  float *lse;                      /* [batch, heads, time] */
} pg_block_buffers;

/* How far a pass has come: hidden states are there, their gradient too, the blocks' buffers have
 * been used up by the backward pass (the hidden states remain). */
typedef enum pg_stage {
  PG_STAGE_NONE,
  PG_STAGE_HIDDEN,
  PG_STAGE_GRADIENT,
  PG_STAGE_CONSUMED
} pg_stage;

struct pg_activations {
  pg_context *context;
  pg_model_config config;
  pg_dtype compute;
  int64_t capacity, max_time; /* positions; longest sequence (rows of the rotation tables) */
  pg_keep keep;
  pg_arena arena;

  pg_block_buffers *blocks;        /* [layers], host memory */
  void *output;                    /* [N, d] after the last block */
  float *output_rstd;              /* [N] */
  void *hidden;                    /* [N, d] after the final norm: what the head reads */
  void *stream;                    /* [N, d] gradient of the residual stream */
  void *norm;                      /* [N, d] a norm's output, in both passes */
  void *dnorm;                     /* [N, d] its gradient; that of `hidden` at first */
  void *dproduct;                  /* [N, F]; shares memory with the next four */
  void *dattended, *dq, *dk, *dv;  /* [N, D] */
  float *cosine, *sine;            /* [max_time, head_dim / 2] */
  int32_t *tokens[2], *targets[2]; /* [N]; the first in use, the other for the next to arrive */
  float *losses;                   /* [N] */
  double *loss_sum;                /* [1] for those who download it */
  float *logits;                   /* [chunk, logits_ld]; shares memory with the blocks' scratch */
  float *wide;                     /* [chunk, d] hidden states of a chunk in fp32; NULL in fp32 */
  void *inner, *dinner;            /* [chunk, rank] B h of a chunk, in fp32 or narrower, and its
                                      gradient; NULL where the head is one matrix */
  void *projected;                 /* [chunk, backward_rank]; NULL without it */
  float *moment;                   /* [k, k] U^T g h^T for a head of k columns; NULL unless the
                                      residual is dropped */
  int64_t chunk, logits_ld;

  /* the last forward */
  const pg_model *model; /* NULL: none; only compared */
  int64_t batch, time;
  pg_stage stage;
};

/* Elements of the storage of all values, padding included. */
int64_t pg__model_elements(const pg_model *model);
/* True when activations planned for one fit the other: everything but initial weights and the
 * scale of the logits. */
bool pg__model_config_matches(const pg_model_config *a, const pg_model_config *b);
/* PG_EINVAL unless a was made for the model's config and compute type. */
int pg__activations_check(const pg_model *model, const pg_activations *a);
/* Bytes of the chunk of logits of activations for n positions, part of pg_activations_bytes. */
int64_t pg__logits_bytes(const pg_model_config *config, pg_dtype compute, int64_t n);
/* Upload ids[n] beside what is queued, into pair[1], which then becomes pair[0]. */
int pg__bring_ids(pg_context *ctx, const int32_t *ids, int64_t n, int32_t *pair[2]);
/* pg_head_loss that waits for nothing: *loss_sum is device memory. */
int pg__head_loss(const pg_model *model, pg_activations *a, const int32_t *targets,
                  double gradient_scale, double *loss_sum);
/* PG_EDATA unless all of ids[n] are in [0, vocab); `what` is "token" or "target". */
int pg__check_ids(pg_context *ctx, const int32_t *ids, int64_t n, int64_t vocab, const char *what);

/* Parameter `which` of block `layer`. */
static inline pg_parameter *pg__block_parameter(const pg_model *model, int64_t layer, int which) {
  return &model->parameters[1 + layer * PG_BLOCK_MATRICES + which];
}
/* Whether the backward pass keeps less than the whole width. */
static inline bool pg__head_narrows(const pg_model_config *c) {
  return c->head.backward_rank && c->head.backward_rank < c->width;
}
/* What products read of a parameter, in the model's compute type. */
static inline const void *pg__weight(const pg_parameter *w) {
  return w->copy ? w->copy->data : w->value->data;
}
/* Element `offset` of an activation of this type. */
static inline void *pg__element(pg_dtype type, const void *x, int64_t offset) {
  return (char *)x + offset * (type == PG_BF16 ? 2 : 4);
}
/* An operand of a product: op(data) with data row-major, rows `ld` elements apart. rows and columns
 * are those of op(data). */
typedef struct pg__operand {
  const void *data;
  int64_t rows, columns, ld;
  pg_dtype type;
  bool transposed;
} pg__operand;
/* data[rows, columns], and its transpose. */
static inline pg__operand pg__plain(pg_dtype type, const void *data, int64_t rows, int64_t columns,
                                    int64_t ld) {
  return (pg__operand){data, rows, columns, ld, type, false};
}
static inline pg__operand pg__transpose(pg_dtype type, const void *data, int64_t rows,
                                        int64_t columns, int64_t ld) {
  return (pg__operand){data, columns, rows, ld, type, true};
}
/* c[a.rows, b.columns] = alpha a b + beta addend; a.columns == b.rows. The addend lies as c does
 * and is c when it is NULL. */
int pg__product(pg_context *ctx, double alpha, pg__operand a, pg__operand b, double beta,
                const void *addend, pg_dtype type_c, void *c, int64_t ldc);
/* x, dy and addend are activations. out[n, rows] = x[n, columns] W^T, the forward of a linear map,
 * plus addend [n, rows], which may be out, unless it is NULL. */
int pg__linear(const pg_activations *a, const pg_parameter *w, const void *x, int64_t n,
               const void *addend, void *out);
/* dx[n, columns] = beta dx + dy[n, rows] W, and W's gradient += dy^T x when it has one. */
int pg__linear_backward(const pg_activations *a, const pg_parameter *w, const void *dy,
                        const void *x, int64_t n, float beta, void *dx);
/* Block `layer` from b->input to `output` [N, d] (may be b->middle; NULL: only what the backward
 * pass reads), and back: a->stream holds the gradient of the output, then that of the input. */
int pg__block_forward(const pg_model *model, pg_activations *a, int64_t layer, void *output);
int pg__block_backward(const pg_model *model, pg_activations *a, int64_t layer);

/* Logits [count, classes] of positions from `first` of the last forward, at most a->chunk, and what
 * the head's last matrix reads there [count, its columns]: in fp32 from the fp32 weights, without
 * gaps, to host memory. */
int pg__head_rows(const pg_model *model, pg_activations *a, int64_t first, int64_t count,
                  float *host);
int pg__head_inputs(const pg_model *model, pg_activations *a, int64_t first, int64_t count,
                    float *host);
/* pg_model_forward that calls `after` (NULL: nothing) when a block is done, whose queries and keys
 * are then in its buffers. */
typedef int pg__block_fn(void *self, int64_t layer);
int pg__model_forward_blocks(const pg_model *model, pg_activations *a, const int32_t *tokens,
                             int64_t batch, int64_t time, pg__block_fn *after, void *self);

/* As a forward pass of a model without blocks that ends in these hidden states [n, width], fp32. */
int pg__model_given(const pg_model *model, pg_activations *a, const pg_tensor *states,
                    const void **hidden);
/* PG_EINVAL unless both are of one context and one softmax. */
int pg__check_comparable(const pg_model *from, const pg_model *to);
/* Ranges of z_to - z_from for the first `count` positions of the last forward of each, in fp32. */
int pg__head_between(const pg_model *from, pg_activations *a, const pg_model *to, pg_activations *b,
                     int64_t count, float *range);

#endif
