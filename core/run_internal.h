/* Fields of a run, shared by run.c, update.c and checkpoint.c. */
#ifndef PG_RUN_INTERNAL_H
#define PG_RUN_INTERNAL_H

#include "internal.h"
#include "model_internal.h"
#include "run.h"

/* An assignment and the parameters it updates now; parameters can move to another one. */
typedef struct pg__assigned {
  pg_assignment public;
  pg_parameter **parameters;
  size_t count;
  /* 1 - decay of its last update, which made the run's `kept_at` updates; NaN where the gradient or
   * the decay of that was not everywhere the same multiple */
  double keep;
  int64_t kept_at; /* 0: none */
} pg__assigned;

/* What the host has to know of an update's gradients before it goes on: see pg_run_gradients. */
typedef struct pg__report {
  pg_clip clip;
  double losses[]; /* [rounds] sums over this rank's micro-batches */
} pg__report;

struct pg_run {
  pg_context *context;
  pg_model *model; /* borrowed */
  pg_comm *comm;
  pg_loader *loader; /* NULL with `hidden` */
  pg_tensor *hidden; /* a view of the states that were given; NULL */
  pg_activations *activations;
  int64_t sequences, micro, time;
  pg_keep keep;
  int64_t rounds; /* micro-batches of this rank in an update */
  double max_norm;
  bool keep_all_increments;
  bool sharded;  /* shard_optimizer with several ranks */
  int *owners;   /* [parameters]: who updates it, a rank or PG__SPLIT */
  double *loads; /* [world]: cost of the whole matrices that a rank updates */

  pg__assigned **assigned; /* pointers stay valid for pg_run_assignment */
  int assigned_count;

  bool prepared;        /* gradients and scratch fit the present assignments */
  pg_tensor *gradients; /* all gradients, contiguous in backward order */
  bool wants_moment;    /* a trial needs `moment` */
  pg_tensor *moment;    /* [d, d]: mean of h h^T over the batch, h the head's inputs; or NULL */
  pg_tensor *scratch;   /* increments not kept nor applied at once, a chunk at a time */
  double *sums;         /* device: one sum of squares per parameter with a gradient */
  size_t sums_bytes;
  double *local_sums;        /* device, [parameters]: the same of this rank alone; several ranks */
  size_t next_ready;         /* gradients of this and later parameters are being reduced */
  int64_t reduced, filled;   /* elements of `gradients` reduced, and complete on this rank */
  pg__report *report, *told; /* device, and where it arrives on the host */
  size_t report_bytes;
  int32_t *inputs, *targets; /* host, [micro * time] */

  int64_t updates, tokens;
  bool have_gradients;    /* pg_run_gradients done, pg_run_apply due */
  bool torn;              /* an update failed halfway: weights and slots are not one state */
  pg_loader_state before; /* data position before the gradients now held */

  bool applied; /* the gradients held are those of an applied update; its loss and factor: */
  double last_loss, last_factor;
  struct {
    bool wanted, measured;
    pg_tensor *parts; /* what one micro-batch adds to `gradients` */
    double *sums;     /* device, [rounds]: its squares */
    double small_square, large_square;
  } noise;
};

/* The hidden states of the next micro-batch, whose targets are then in run->targets. */
int pg__next_states(pg_run *run, const void **hidden);

/* ---- optimizer work shared by the ranks: shard.c ---- */
#define PG__SPLIT (-1) /* every rank updates its rows */
/* The rows [*first, *first + result) of p that `rank` updates: all of them unless sharded. */
int64_t pg__part(const pg_run *run, const pg_parameter *p, int rank, int64_t *first);
/* Decide who updates these parameters under `o`; those whose optimizer is `o` already stay. */
int pg__share_out(pg_run *run, const pg_optimizer *o, pg_parameter *const *parameters,
                  size_t count);
/* Shape of this rank's part of a slot; returns ndim. */
int pg__slot_part(const pg_run *run, const pg_parameter *p, const pg_slot *slot, int64_t shape[2]);
/* Give all ranks the weights and kept increments that each has made. */
int pg__exchange(pg_run *run);

/* ---- the noise scale: run_measure.c, called around each micro-batch of an update ---- */
void pg__noise_free(pg_run *run);
int pg__noise_before(pg_run *run);
int pg__noise_part(pg_run *run, int64_t at, int64_t n);
int pg__noise_sum(pg_run *run, int64_t m);
int pg__noise_finish(pg_run *run, double norm);

/* A run without memory, of a model that may have none, for its assignments. */
int pg__run_describe(pg_model *model, const pg_run_options *options, pg_run **out);
/* Elements of fp32 that the present assignments need; of increments, `increments` are kept. */
typedef struct pg__run_elements {
  int64_t gradients, increments, scratch;
  int64_t moment;
} pg__run_elements;
void pg__run_sizes(const pg_run *run, pg__run_elements *out);
/* PG_EINVAL when `o` needs moments that a run does not measure for p. */
int pg__check_suits(pg_context *ctx, const pg_optimizer *o, const pg_parameter *p);
/* Allocate gradients, increments and scratch for the present assignments. */
int pg__run_prepare(pg_run *run);
/* Largest number of increment elements computed at once, unless one parameter is larger. */
#define PG__CHUNK_ELEMENTS ((int64_t)1 << 24)

#endif
