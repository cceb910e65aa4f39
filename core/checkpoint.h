/* Checkpoints: a folder that Hugging Face transformers loads as it is (config.json,
 * model.safetensors, tokenizer.json), plus optimizer.safetensors (slots), increment.safetensors
 * (kept increments), host.safetensors (the host's own tensors), state.json (counters, data
 * position, the host's state) and manifest.json (size and SHA-256 of every other file, written
 * last). The folder is written under a temporary name, synced and renamed, so a checkpoint under
 * its final name is complete; the manifest detects later damage. */
#ifndef PG_CHECKPOINT_H
#define PG_CHECKPOINT_H

#include "run.h"
#include "safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_checkpoint_options {
  const char *tokenizer;          /* file to copy as tokenizer.json; NULL: none */
  const char *host_state;         /* a JSON value kept under "host" in state.json; NULL: null */
  const pg_named_tensor *tensors; /* of the host, into host.safetensors when there are any */
  size_t tensor_count;
} pg_checkpoint_options;
/* Save the run as folder `path` (its parent exists). Free space is checked first. An existing
 * checkpoint of that name is replaced only after the new one is complete. All ranks call it with
 * the same path; the first one writes, and what it writes does not depend on how many there are. */
int pg_checkpoint_save(const pg_run *run, const char *path, const pg_checkpoint_options *options);

/* 0 when the manifest and every file it names are intact (`hashes` false: names and sizes only);
 * PG_EFORMAT or PG_ENOENT with the reason otherwise. */
int pg_checkpoint_verify(pg_context *ctx, const char *path, bool hashes);

typedef enum pg_slots_policy { PG_SLOTS_KEEP, PG_SLOTS_RESET } pg_slots_policy;
typedef struct pg_checkpoint_load_options {
  pg_slots_policy slots[PG_ROLES]; /* reset: slots and update counts of that role start at zero */
  bool restart_data;               /* the data position is not restored */
} pg_checkpoint_load_options;
/* Restore into a run whose parameters are assigned: weights, slots, update counts, increments,
 * counters and data position. NULL options: everything (a resume). Kept slots need the same
 * optimizer name and slots: PG_EFORMAT names the first parameter that differs. *host_state, when
 * not NULL, receives the malloc'ed JSON text of "host". */
int pg_checkpoint_load(pg_run *run, const char *path, const pg_checkpoint_load_options *options,
                       char **host_state);
/* Only the model configuration of a checkpoint folder (config.json). */
int pg_checkpoint_config(pg_context *ctx, const char *path, pg_model_config *config);

#ifdef __cplusplus
}
#endif
#endif
