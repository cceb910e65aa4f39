/* A trial: what an optimizer would do to one parameter of a run, from the gradients of the run. Its
 * slots and its increment are its own; weights, slots and counts of the run stay as they are. For
 * what-if questions, and for optimizers that look on while another one trains. */
#ifndef PG_TRIAL_H
#define PG_TRIAL_H

#include "run.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_trial pg_trial;

/* `inherit` starts from the parameter's own slots and count, which must be of this optimizer; else
 * slots are zero. The run, the parameter and the descriptor must outlive the trial. PG_EINVAL for a
 * frozen parameter or optimizer, and for a run whose optimizers are shared out over ranks. */
int pg_trial_new(pg_run *run, pg_parameter *parameter, const pg_optimizer *optimizer,
                 const double hypers[PG_MAX_HYPERS], bool inherit, pg_trial **out);
void pg_trial_free(pg_trial *trial);
/* Advance the slots by the gradient that the parameter holds, as one update with this learning-rate
 * scale would, and write the increment. */
int pg_trial_increment(pg_trial *trial, double scale);
/* The last increment [rows, columns]; zeros at first. It belongs to the trial. */
const pg_tensor *pg_trial_value(const pg_trial *trial);
const pg_optimizer *pg_trial_optimizer(const pg_trial *trial);
/* The hyperparameters, which the host may change between increments. */
double *pg_trial_hypers(pg_trial *trial);
/* What a host keeps that continues the trial later: how many increments there were, the last one,
 * and the slots in the optimizer's order. They belong to the trial. */
int64_t pg_trial_updates(const pg_trial *trial);
const pg_tensor *pg_trial_slot(const pg_trial *trial, size_t slot);
/* From there on; NULL slots and increment stay as they are. Shapes and types have to agree. */
int pg_trial_resume(pg_trial *trial, int64_t updates, const pg_tensor *increment,
                    const pg_tensor *const *slots);

#ifdef __cplusplus
}
#endif
#endif
