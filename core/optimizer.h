/* Optimizers as descriptors. One file per optimizer in core/optimizers/ exports one const
 * descriptor; core/optimizers/registry.c lists it. State is data: checkpoints, sharding, reports
 * and the REPL iterate over the slots and never name `m` or `v`. Recipes, help and range checks
 * read the hyperparameter list.
 *
 * An update has two phases. `increment` turns gradients, slots and hyperparameters into increments
 * S for a group of like-shaped parameters at once; it advances the slots and touches no weight.
 * Applying, w <- (1 - decay) w + S, belongs to the run and is the same for all. An optimizer whose
 * kernels can also apply what they have in registers says so: where the run asks for it, one call
 * does both, with the same bits, and an increment that nobody keeps never exists. */
#ifndef PG_OPTIMIZER_H
#define PG_OPTIMIZER_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PG_MAX_HYPERS 16 /* values, a pair counting twice */
#define PG_MAX_SLOTS 8

typedef enum pg_hyper_kind {
  PG_HYPER_NUMBER,
  PG_HYPER_INTEGER,
  PG_HYPER_BOOLEAN,
  PG_HYPER_PAIR,  /* two numbers under one name, as betas: two consecutive values */
  PG_HYPER_CHOICE /* the index into choices */
} pg_hyper_kind;

typedef struct pg_hyper {
  const char *name; /* as in recipes; every optimizer but frozen has lr and weight_decay */
  pg_hyper_kind kind;
  double initial[2];          /* default; NaN: there is none and recipes must give a value */
  double min, max;            /* allowed range */
  bool open_min, open_max;    /* the end itself is excluded */
  const char *const *choices; /* NULL-terminated, for PG_HYPER_CHOICE */
  const char *help;           /* one line, with the unit */
} pg_hyper;

typedef enum pg_slot_shape {
  PG_SLOT_MATRIX,         /* [rows, columns] */
  PG_SLOT_ROW,            /* [rows]: one number per row */
  PG_SLOT_COLUMN,         /* [columns]: one number per column */
  PG_SLOT_ROWS_SQUARE,    /* [rows, rows] */
  PG_SLOT_COLUMNS_SQUARE, /* [columns, columns] */
  PG_SLOT_SCALAR,         /* [] */
  PG_SLOT_ROWS_FACTOR,    /* [rows, rows], or [0, 0] of more than PG_FACTOR_LIMIT rows */
  PG_SLOT_COLUMNS_FACTOR  /* the same of columns */
} pg_slot_shape;
/* The largest side for which an optimizer keeps a factor that it decomposes. */
#define PG_FACTOR_LIMIT 4096

typedef struct pg_slot {
  const char *name;
  pg_slot_shape shape;
  pg_dtype dtype;
} pg_slot;

/* How increments may be computed on a part of a parameter when ranks share the work. */
typedef enum pg_sharding {
  PG_SHARD_ELEMENTS,        /* any part */
  PG_SHARD_ROWS,            /* whole rows */
  PG_SHARD_ROWS_COLUMN_SUM, /* whole rows, plus one sum over rows */
  PG_SHARD_WHOLE            /* the whole matrix */
} pg_sharding;

/* One call's work: `count` parameters of one shape, updated alike. */
typedef struct pg_increment_group {
  pg_context *context;
  size_t count;
  int64_t rows, columns;         /* of this rank's part, when ranks share the work */
  int64_t all_rows;              /* of the whole parameters */
  int64_t first_row;             /* of this part, from 0 */
  struct pg_comm *comm;          /* the ranks that share it; for PG_SHARD_ROWS_COLUMN_SUM */
  const float *const *gradients; /* [count], clipped */
  void *const *const *slots;     /* [count][slot] device memory */
  float *const *increments;      /* [count], to be written completely; with `apply` some are NULL */
  const float *const
      *moments;           /* [count] of [columns, columns], where the optimizer asks for them */
  const int64_t *updates; /* [count], n: 1 at the first update */
  const double *hypers;   /* values in the order of the descriptor's list */
  double lr;              /* peak lr x schedule scale, of this update */
  struct pg_parameter *const *parameters; /* [count], for optimizers defined by the host */
  float *const *values;                   /* [count], the weights before this update */
  /* Only where the optimizer `applies`: values <- keep values + S, and the copies that there are
   * receive them in bf16. Otherwise the weights stay as they are. */
  bool apply, cautious;    /* cautious: only weights that S moves towards zero decay */
  double keep;             /* 1 - decay */
  uint16_t *const *copies; /* [count], some NULL */
} pg_increment_group;

typedef struct pg_optimizer {
  const char *name;
  const char *help; /* one paragraph: the equation and its source */
  const pg_hyper *hypers;
  size_t hyper_count;
  const pg_slot *slots;
  size_t slot_count;
  pg_sharding sharding;
  bool applies; /* obeys the group's `apply` */
  /* Needs the second moment of its parameters' inputs, the mean of x x^T over the positions of the
   * optimizer batch. Runs measure that of the head, so that it is for heads alone. */
  bool moments;
  int64_t most_rows; /* refuses larger parameters; 0: takes any */
  /* NULL: parameters are frozen (no gradient, no slots, no share in the norm). `self` is the
   * descriptor's own data, below. */
  int (*increment)(const pg_increment_group *group, void *self);
  /* Bytes of device memory that such a call takes for its own and gives back; NULL: none. Of the
   * group only count, rows, columns, all_rows and hypers are set, and of the increments whether
   * there are any. */
  int64_t (*scratch)(const pg_increment_group *group);
  /* What the shape multiplies the step by, for tables; NULL: 1. */
  double (*factor)(const double *hypers, int64_t rows, int64_t columns);
  void *self; /* for optimizers defined by a host program; NULL in the core's own */
} pg_optimizer;

/* The registered optimizers in order; NULL past the end. */
const pg_optimizer *pg_optimizer_at(size_t index);
/* By name; NULL when unknown. */
const pg_optimizer *pg_optimizer_find(const char *name);
/* Index into the value array of a hyperparameter (pairs: of the first value); -1 when unknown. */
int pg_optimizer_hyper_index(const pg_optimizer *o, const char *name, const pg_hyper **out);
/* The defaults. */
void pg_optimizer_defaults(const pg_optimizer *o, double values[PG_MAX_HYPERS]);
/* PG_EINVAL names the hyperparameter, its value and the allowed range. */
int pg_optimizer_check(pg_context *ctx, const pg_optimizer *o, const double values[PG_MAX_HYPERS]);
/* Shape of a slot for a parameter [rows, columns]; returns ndim. */
int pg_slot_dims(const pg_slot *slot, int64_t rows, int64_t columns, int64_t shape[2]);

#ifdef __cplusplus
}
#endif
#endif
