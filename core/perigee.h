/* Perigee's core for a C host: include this one header. Every part belongs to a pg_context; every
 * fallible function returns 0 or a negative error (error.h) with a text in the context. A typical
 * host: pg_context_new, pg_model_new, pg_model_init, pg_run_new, pg_run_assign, then pg_run_step
 * in a loop, pg_geometry_diameter on the head's increment, pg_checkpoint_save. */
#ifndef PERIGEE_H
#define PERIGEE_H

#include "bottleneck.h"
#include "checkpoint.h"
#include "comm.h"
#include "context.h"
#include "data.h"
#include "error.h"
#include "events.h"
#include "files.h"
#include "first_order.h"
#include "functional.h"
#include "generate.h"
#include "geometry.h"
#include "logits.h"
#include "metrics.h"
#include "model.h"
#include "npy.h"
#include "optimizer.h"
#include "oracle.h"
#include "profile.h"
#include "random.h"
#include "rows.h"
#include "run.h"
#include "safetensors.h"
#include "schedule.h"
#include "tensor.h"
#include "tensor_ops.h"
#include "tokenizer.h"
#include "trial.h"
#include "version.h"
#include "weight_size.h"

#endif
