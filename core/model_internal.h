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
  size_t count;
  pg_parameter *parameters; /* embedding, blocks, head */
};

/* What a block's backward pass reads, N = batch * time positions, d = width, D = heads * head_dim,
 * F = mlp. Without training all blocks share one set, with input == middle: the residual stream is
 * then updated in place. */
typedef struct pg_block_buffers {
  float *input;         /* [N, d] residual stream before the block; output: the next one's input */
  float *middle;        /* [N, d] after attention */
  float *q_raw, *k_raw; /* [N, D] before norm and rotation */
  float *q, *k, *v;     /* [N, D] as attention reads them */
  float *attended;      /* [N, D] */
  float *gate, *up;     /* [N, F]; the backward pass replaces them by their gradients */
  float *product;       /* [N, F] silu(gate) up */
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
  int64_t capacity, max_time; /* positions; longest sequence (rows of the rotation tables) */
  bool training;
  pg_arena arena;

  pg_block_buffers *blocks;        /* [layers], host memory */
  float *output, *output_rstd;     /* [N, d] after the last block, [N] */
  float *hidden;                   /* [N, d] after the final norm: what the head reads */
  float *stream;                   /* [N, d] gradient of the residual stream */
  float *norm;                     /* [N, d] a norm's output, in both passes */
  float *dnorm;                    /* [N, d] its gradient; that of `hidden` at first */
  float *dproduct;                 /* [N, F]; shares memory with the next four */
  float *dattended, *dq, *dk, *dv; /* [N, D] */
  float *cosine, *sine;            /* [max_time, head_dim / 2] */
  int32_t *tokens, *targets;       /* [N] */
  float *losses;                   /* [N] */
  float *logits;                   /* [chunk, logits_ld]; shares memory with the blocks' scratch */
  int64_t chunk, logits_ld;
  float *host; /* [N] host memory: losses or ranges on their way out */

  /* the last forward */
  const pg_model *model; /* NULL: none; only compared */
  int64_t batch, time;
  pg_stage stage;
};

/* True when activations planned for one fit the other: everything but initial weights and the
 * scale of the logits. */
bool pg__model_config_matches(const pg_model_config *a, const pg_model_config *b);
/* PG_EINVAL unless a was made for the model's config. */
int pg__activations_check(const pg_model *model, const pg_activations *a);
/* PG_EDATA unless all of ids[n] are in [0, vocab); `what` is "token" or "target". */
int pg__check_ids(pg_context *ctx, const int32_t *ids, int64_t n, int64_t vocab, const char *what);

/* Parameter `which` of block `layer`. */
static inline pg_parameter *pg__block_parameter(const pg_model *model, int64_t layer, int which) {
  return &model->parameters[1 + layer * PG_BLOCK_MATRICES + which];
}
/* out[n, rows] = beta out + x[n, columns] W^T, the forward of a linear map. */
int pg__linear(pg_context *ctx, const pg_parameter *w, const float *x, int64_t n, float beta,
               float *out);
/* dx[n, columns] = beta dx + dy[n, rows] W, and W's gradient += dy^T x when it has one. */
int pg__linear_backward(pg_context *ctx, const pg_parameter *w, const float *dy, const float *x,
                        int64_t n, float beta, float *dx);
/* Block `layer` from b->input to `output` [N, d] (may be b->middle), and back: a->stream holds the
 * gradient of the output, then that of the input. */
int pg__block_forward(const pg_model *model, pg_activations *a, int64_t layer, float *output);
int pg__block_backward(const pg_model *model, pg_activations *a, int64_t layer);

#endif
