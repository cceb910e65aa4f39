/* Fields of a run, shared by run.c, update.c and checkpoint.c. */
#ifndef PG_RUN_INTERNAL_H
#define PG_RUN_INTERNAL_H

#include "internal.h"
#include "run.h"

/* An assignment and the parameters it updates now; parameters can move to another one. */
typedef struct pg__assigned {
  pg_assignment public;
  pg_parameter **parameters;
  size_t count;
} pg__assigned;

struct pg_run {
  pg_context *context;
  pg_model *model; /* borrowed */
  pg_comm *comm;
  pg_loader *loader;
  pg_activations *activations;
  int64_t sequences, micro, time;
  double max_norm;
  bool keep_all_increments;

  pg__assigned **assigned; /* pointers stay valid for pg_run_assignment */
  int assigned_count;

  bool prepared;        /* gradients and scratch fit the present assignments */
  pg_tensor *gradients; /* all gradients, contiguous in backward order */
  pg_tensor *scratch;   /* increments that are not kept, one chunk of a group at a time */
  double *sums;         /* device: one sum of squares per parameter with a gradient */
  size_t sums_bytes;
  pg_clip *clip;             /* device */
  int32_t *inputs, *targets; /* host, [micro * time] */

  int64_t updates, tokens;
  bool have_gradients;    /* pg_run_gradients done, pg_run_apply due */
  bool torn;              /* an update failed halfway: weights and slots are not one state */
  pg_loader_state before; /* data position before the gradients now held */
};

/* Allocate gradients, increments and scratch for the present assignments. */
int pg__run_prepare(pg_run *run);
/* Largest number of increment elements computed at once, unless one parameter is larger. */
#define PG__CHUNK_ELEMENTS ((int64_t)1 << 24)

#endif
