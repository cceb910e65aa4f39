/* Shared by the reading and the writing side of checkpoints. */
#ifndef PG_CHECKPOINT_INTERNAL_H
#define PG_CHECKPOINT_INTERNAL_H

#include "checkpoint.h"
#include "json.h"
#include "run_internal.h"
#include "version.h"

#define PG__PATH_MAX 4096
#define PG__CHECKPOINT_FORMAT 1

/* FOLDER/NAME into out; PG_EINVAL when it does not fit. */
int pg__join(pg_context *ctx, const char *folder, const char *name, char out[PG__PATH_MAX]);
/* "PARAMETER.SLOT": the tensor name of a slot in optimizer.safetensors. malloc'ed, NULL when out of
 * memory. */
char *pg__slot_name(const pg_parameter *p, const pg_slot *slot);
/* config.json as transformers reads it, with Perigee's additions under "perigee". */
json_t *pg__model_config_json(const pg_model_config *config);

#endif
