/* A run: a model, its data, who updates which parameter, and one explicit step function.
 *
 * One step: micro-batches -> gradients -> global norm, clip, refusal -> increments -> apply
 * (SPEC §3). Learning-rate scales and hyperparameters are the host's to set between steps: a
 * schedule is whatever the host computes. The step function is the only thing that changes
 * weights, slots or the data position. */
#ifndef PG_RUN_H
#define PG_RUN_H

#include "comm.h"
#include "data.h"
#include "model.h"
#include "optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_run pg_run;

typedef struct pg_run_options {
  /* Hidden states that come from elsewhere, instead of data: [sequences, width], fp32, contiguous,
   * and the token after each, [sequences] on the host. Every update is over all of them. The model
   * has no blocks, a context of 1 and a frozen embedding; one rank, micro = sequences. Such a run
   * has no data position: no loader, no checkpoint. */
  const pg_tensor *hidden;
  const int32_t *targets;
  const char *data;  /* folder of shards */
  const char *train; /* glob of the training shards; NULL: "*_train_*.bin" */
  int64_t sequences; /* per optimizer batch */
  int64_t micro;     /* per micro-batch; 0: sequences. sequences % (micro * world) == 0 */
  double max_norm;   /* clip; infinity measures the norm only */
  uint64_t data_seed;
  int read_ahead;           /* micro-batches, 0: default */
  bool keep_all_increments; /* false: only the head's */
  bool recompute;           /* PG_KEEP_INPUTS: less memory, more time, the same results */
  pg_comm *comm;            /* NULL: pg_comm_self(). Not owned */
  /* Split the optimizers' work and slots over the ranks, as each descriptor declares. Slots then
   * hold this rank's part: its rows, nothing, or everything. */
  bool shard_optimizer;
} pg_run_options;

/* An assignment: an optimizer with its hyperparameters and the parameters it updates. */
typedef struct pg_assignment {
  const pg_optimizer *optimizer; /* read-only */
  double hypers[PG_MAX_HYPERS];  /* the host may change these between steps */
  double scale;                  /* learning-rate scale of the next step; the host sets it */
  bool independent_decay;        /* decay = scale * weight_decay instead of lr * weight_decay */
  bool cautious;                 /* only weights that S moves towards zero decay; false at first */
  double max_norm; /* of each parameter's gradient, after the clip of all; infinity at first */
} pg_assignment;

/* The model is borrowed and must outlive the run, which gives it gradients and increments. */
int pg_run_new(pg_model *model, const pg_run_options *options, pg_run **out);
void pg_run_free(pg_run *run);
pg_model *pg_run_model(const pg_run *run);
pg_comm *pg_run_comm(const pg_run *run);
/* Whether slots are split over several ranks. */
bool pg_run_sharded(const pg_run *run);
/* All of slot s of p's optimizer, whose parts the ranks hold: a new tensor on every rank. Takes all
 * ranks. */
int pg_run_gather_slot(const pg_run *run, const pg_parameter *p, size_t s, pg_tensor **out);
/* Bytes of slots that this rank holds, and that all ranks together hold. */
void pg_run_slot_bytes(const pg_run *run, int64_t *here, int64_t *everywhere);
pg_loader *pg_run_loader(const pg_run *run);           /* NULL: hidden states were given */
pg_activations *pg_run_activations(const pg_run *run); /* of micro sequences; also for evaluation */

/* Let `optimizer` update these parameters. A parameter that already has an assignment changes
 * hands: with the same descriptor its slots and update count stay, otherwise they start anew. The
 * optimizer's descriptor must outlive the run. */
int pg_run_assign(pg_run *run, const pg_optimizer *optimizer, const double hypers[PG_MAX_HYPERS],
                  bool independent_decay, pg_parameter *const *parameters, size_t count,
                  int *assignment);
pg_assignment *pg_run_assignment(pg_run *run, int index);
/* PG_EINVAL listing the parameters that nobody updates. pg_run_step calls it too. */
int pg_run_check(pg_run *run);

/* Whether the data serves such a run, as pg_run_new finds it; *updates of an epoch. */
int pg_run_data(pg_context *ctx, const pg_model_config *config, const pg_run_options *options,
                int64_t *updates);

/* ---- memory ---------------------------------------------------------------------------- */
/* Parameters, by their index in the model's order, that an optimizer updates. */
typedef struct pg_run_entry {
  const pg_optimizer *optimizer;
  const double *hypers; /* as pg_run_assign takes them; NULL: the defaults */
  const size_t *parameters;
  size_t count;
} pg_run_entry;
/* Bytes of device memory that one rank of a run takes at its peak, model included. */
typedef struct pg_run_memory {
  int64_t weights, copies, gradients;
  int64_t slots;       /* of this rank */
  int64_t increments;  /* those that are kept */
  int64_t activations; /* INT64_MAX: too many to count */
  int64_t logits;      /* the chunk of logits, which shares memory within `activations` */
  int64_t scratch;     /* increments that are not kept, what optimizers or the diameter use */
  int64_t workspace;   /* the backend's own */
  int64_t total;       /* of all but logits; INT64_MAX: too much to count */
} pg_run_memory;
/* What a run of these options (of which the data is not looked at) would need, before anything of
 * it is allocated; `diameter`: its head's increments are measured. Not counted: tensors that a host
 * makes, and code that a driver loads. PG_EINVAL as pg_run_new and pg_run_check. */
int pg_run_estimate(pg_context *ctx, const pg_model_config *config, pg_dtype compute,
                    const pg_run_options *options, const pg_run_entry *entries, size_t count,
                    bool diameter, pg_run_memory *out);

typedef struct pg_step {
  double loss;                  /* mean cross entropy over the optimizer batch */
  double norm;                  /* global gradient norm before clipping */
  double factor;                /* what the gradients were multiplied by */
  int64_t update;               /* completed updates after this one */
  int64_t tokens;               /* trained on so far */
  uint64_t batch_hash;          /* identity of the tokens of this update */
  double seconds, wait_seconds; /* of this step; waiting for data within it */
} pg_step;
/* One update, together on all ranks. PG_ENONFINITE (loss or norm; names the first bad parameter,
 * and the rank, alike on all ranks) and errors before the increments leave weights, slots and
 * counts untouched. Any other error ends the communicator: the other ranks fail with its text. */
int pg_run_step(pg_run *run, pg_step *out);
/* The gradients of the next optimizer batch and their clipping, nothing applied; the data position
 * advances. pg_run_step is this plus pg_run_apply. */
int pg_run_gradients(pg_run *run, pg_step *out);
int pg_run_apply(pg_run *run, pg_step *out);
/* Back to a data position, after gradients that were only looked at: they cannot be applied. */
int pg_run_rewind(pg_run *run, const pg_loader_state *position);

int64_t pg_run_updates(const pg_run *run);
int64_t pg_run_tokens(const pg_run *run);
/* Restore counters (checkpoints and forks). */
void pg_run_set_progress(pg_run *run, int64_t updates, int64_t tokens);

#ifdef __cplusplus
}
#endif
#endif
