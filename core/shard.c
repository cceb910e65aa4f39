/* How the ranks of a run share the optimizers' work. A descriptor says what it can do: work on any
 * rows of a matrix (every rank takes its rows, and keeps slots for them only), or on whole matrices
 * (each has one owner, by falling cost to the rank with the least). The gradients are complete on
 * every rank; what a rank has updated is sent to the others afterwards. */
#include "run_internal.h"

#include <stdlib.h>
#include <string.h>

static size_t index_of(const pg_run *run, const pg_parameter *p) {
  return (size_t)(p - pg_model_parameter(run->model, 0));
}

static const pg_optimizer *optimizer_of(const pg_run *run, const pg_parameter *p) {
  return p->assignment < 0 ? NULL : run->assigned[p->assignment]->public.optimizer;
}

int64_t pg__part(const pg_run *run, const pg_parameter *p, int rank, int64_t *first) {
  *first = 0;
  if (!run->sharded) return p->rows;
  int owner = run->owners[index_of(run, p)], world = pg_comm_world(run->comm);
  if (owner != PG__SPLIT) return owner == rank ? p->rows : 0;
  *first = p->rows * rank / world;
  return p->rows * (rank + 1) / world - *first;
}

/* Every rank must have a row, since a sum over rows is taken together; a slot that is neither per
 * element nor per row would belong to all ranks. */
static bool can_split(const pg_optimizer *o, const pg_parameter *p, int world) {
  if (o->sharding == PG_SHARD_WHOLE || p->rows < world) return false;
  for (size_t s = 0; s < o->slot_count; s++)
    if (o->slots[s].shape != PG_SLOT_MATRIX && o->slots[s].shape != PG_SLOT_ROW &&
        o->slots[s].shape != PG_SLOT_SCALAR)
      return false;
  return true;
}

/* Multiply-adds of one product of the matrix with its own transpose: what the costly optimizers
 * spend is a multiple of it. */
static double cost(const pg_parameter *p) {
  return (double)p->rows * (double)p->columns * (double)pg__min(p->rows, p->columns);
}

typedef struct candidate {
  double cost;
  size_t index; /* of the parameter; breaks ties */
} candidate;

static int dearest_first(const void *a, const void *b) {
  const candidate *x = a, *y = b;
  if (x->cost != y->cost) return x->cost > y->cost ? -1 : 1;
  return (x->index > y->index) - (x->index < y->index);
}

int pg__share_out(pg_run *run, const pg_optimizer *o, pg_parameter *const *parameters,
                  size_t count) {
  int world = pg_comm_world(run->comm);
  size_t whole = 0;
  if (!run->sharded) return 0;
  candidate *list = malloc((count + 1) * sizeof *list);
  if (!list) return pg_fail(run->context, PG_ENOMEM, "out of memory for an assignment");
  for (size_t i = 0; i < count; i++) {
    const pg_parameter *p = parameters[i];
    const size_t index = index_of(run, p);
    const pg_optimizer *old = optimizer_of(run, p);
    if (old == o) continue;
    if (old && run->owners[index] != PG__SPLIT) run->loads[run->owners[index]] -= cost(p);
    run->owners[index] = PG__SPLIT;
    if (!can_split(o, p, world)) list[whole++] = (candidate){cost(p), index};
  }
  qsort(list, whole, sizeof *list, dearest_first);
  for (size_t i = 0; i < whole; i++) {
    int least = 0;
    for (int r = 1; r < world; r++)
      if (run->loads[r] < run->loads[least]) least = r;
    run->owners[list[i].index] = least;
    run->loads[least] += o->increment ? list[i].cost : 0;
  }
  free(list);
  return 0;
}

int pg__slot_part(const pg_run *run, const pg_parameter *p, const pg_slot *slot, int64_t shape[2]) {
  int64_t first, rows = pg__part(run, p, pg_comm_rank(run->comm), &first);
  int ndim = pg_slot_dims(slot, rows == 0 ? p->rows : rows, p->columns, shape);
  if (rows == 0 && ndim > 0) shape[0] = 0;
  return ndim;
}

void pg_run_slot_bytes(const pg_run *run, int64_t *here, int64_t *everywhere) {
  *here = *everywhere = 0;
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    const pg_optimizer *o = optimizer_of(run, p);
    for (size_t s = 0; o && s < o->slot_count; s++) {
      int64_t shape[2], size = (int64_t)pg_dtype_size(o->slots[s].dtype);
      pg_slot_dims(&o->slots[s], p->rows, p->columns, shape);
      *everywhere += shape[0] * shape[1] * size * (run->sharded ? 1 : pg_comm_world(run->comm));
      pg__slot_part(run, p, &o->slots[s], shape);
      *here += shape[0] * shape[1] * size;
    }
  }
}

int pg__exchange(pg_run *run) {
  pg_context *ctx = run->context;
  int status, place;
  if (!run->sharded) return 0;
  place = pg__enter(ctx, PG_PART_OPTIMIZER, "exchange", -1);
  PG_TRY(pg_comm_group_begin(run->comm, ctx));
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    if (!p->gradient) continue;
    for (int r = 0; r < pg_comm_world(run->comm); r++) {
      int64_t first, count = pg__part(run, p, r, &first) * p->columns;
      int64_t bytes = count * (int64_t)sizeof(float), at = first * p->columns;
      PG_TRY(pg_comm_broadcast(run->comm, ctx, (float *)p->value->data + at, bytes, r));
      if (p->increment)
        PG_TRY(pg_comm_broadcast(run->comm, ctx, (float *)p->increment->data + at, bytes, r));
    }
  }
  PG_TRY(pg_comm_group_end(run->comm, ctx));
  PG_TRY(pg_comm_finish(run->comm, ctx));
  PG_TRY(pg_model_refresh(run->model, NULL));
fail:
  pg__leave(ctx, place);
  return status;
}

int pg_run_gather_slot(const pg_run *run, const pg_parameter *p, size_t s, pg_tensor **out) {
  pg_context *ctx = run->context;
  const pg_slot *slot = &optimizer_of(run, p)->slots[s];
  const int rank = pg_comm_rank(run->comm), world = pg_comm_world(run->comm);
  int64_t shape[2], first;
  int status, ndim = pg_slot_dims(slot, p->rows, p->columns, shape);
  *out = NULL;
  PG_TRY(pg_tensor_new(ctx, slot->dtype, ndim, shape, out));
  const int64_t size = (int64_t)pg_dtype_size(slot->dtype), all = shape[0] * shape[1] * size;
  const int64_t row = all / p->rows; /* of a split slot: they are per row or per element */
  const bool per_row = ndim > 0;
  PG_TRY(pg_comm_group_begin(run->comm, ctx));
  for (int r = 0; r < world; r++) {
    int64_t rows = pg__part(run, p, r, &first), bytes = 0, at = 0;
    if (rows == p->rows || (!per_row && r == 0 && rows > 0)) {
      bytes = all;
    } else if (per_row) {
      bytes = rows * row;
      at = first * row;
    }
    char *data = (char *)(*out)->data + at;
    if (r == rank && bytes) PG_LAUNCH(ctx, copy, data, p->slots[s]->data, (size_t)bytes);
    PG_TRY(pg_comm_broadcast(run->comm, ctx, data, bytes, r));
  }
  PG_TRY(pg_comm_group_end(run->comm, ctx));
  PG_TRY(pg_comm_finish(run->comm, ctx));
  return 0;
fail:
  pg_tensor_free(*out);
  *out = NULL;
  return status;
}
