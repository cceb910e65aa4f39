/* Reading checkpoints: the manifest first, then everything it vouches for. */
#include "checkpoint_internal.h"
#include "files.h"
#include "safetensors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define JSON_LIMIT ((int64_t)256 << 20)

int pg_checkpoint_verify(pg_context *ctx, const char *path, bool hashes) {
  char file[PG__PATH_MAX];
  json_t *manifest = NULL, *entry;
  const char *name;
  int status;
  PG_TRY(pg__join(ctx, path, "manifest.json", file));
  PG_TRY(pg__json_load(ctx, file, JSON_LIMIT, &manifest));
  json_t *files = json_object_get(manifest, "files");
  if (!json_is_object(files) || !json_object_get(files, "state.json") ||
      !json_object_get(files, "model.safetensors")) {
    status = pg_fail(ctx, PG_EFORMAT, "%s does not list a checkpoint's files", file);
    goto fail;
  }
  json_object_foreach(files, name, entry) {
    const char *hash = json_string_value(json_object_get(entry, "sha256"));
    json_int_t bytes = json_integer_value(json_object_get(entry, "bytes"));
    struct stat st;
    char hex[65];
    if (!hash || strchr(name, '/')) {
      status = pg_fail(ctx, PG_EFORMAT, "%s: the entry of %s is malformed", file, name);
      goto fail;
    }
    PG_TRY(pg__join(ctx, path, name, file));
    if (stat(file, &st) != 0) {
      status = pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "%s: %s", file, strerror(errno));
      goto fail;
    }
    if (st.st_size != bytes) {
      status = pg_fail(ctx, PG_EFORMAT, "%s has %lld bytes; its checkpoint was saved with %lld",
                       file, (long long)st.st_size, (long long)bytes);
      goto fail;
    }
    if (!hashes) continue;
    PG_TRY(pg_file_sha256(ctx, file, hex));
    if (strcmp(hex, hash) != 0) {
      status = pg_fail(ctx, PG_EFORMAT,
                       "%s was changed after its checkpoint was saved (SHA-256 "
                       "%.12s... instead of %.12s...)",
                       file, hex, hash);
      goto fail;
    }
  }
  status = 0;
fail:
  json_decref(manifest);
  return status;
}

/* This rank's part of a slot. */
static int load_slot(pg_run *run, const pg_parameter *p, size_t s, pg_safetensors *file,
                     const char *key) {
  pg_context *ctx = run->context;
  const pg_slot *slot = &run->assigned[p->assignment]->public.optimizer->slots[s];
  const pg_safetensors_entry *entry = pg_safetensors_find(file, key);
  int64_t shape[2], first, rows = pg__part(run, p, pg_comm_rank(run->comm), &first);
  int ndim = pg_slot_dims(slot, p->rows, p->columns, shape), status = 0;
  const int64_t size = (int64_t)pg_dtype_size(slot->dtype), all = shape[0] * shape[1] * size;
  char *buffer = NULL;
  if (rows == p->rows || ndim == 0) return pg_safetensors_read_tensor(file, key, p->slots[s]);
  if (!entry || entry->bytes != all || strcmp(entry->dtype, pg_dtype_name(slot->dtype)) != 0)
    return pg_fail(ctx, PG_EFORMAT, "%s: expected %lld bytes of %s, found %lld", key,
                   (long long)all, pg_dtype_name(slot->dtype), entry ? (long long)entry->bytes : 0);
  const int64_t row = all / p->rows, bytes = rows * row, chunk = 1 << 20;
  if (bytes && !(buffer = malloc((size_t)pg__min(bytes, chunk))))
    return pg_fail(ctx, PG_ENOMEM, "out of memory for the slots of %s", p->name);
  for (int64_t done = 0; done < bytes; done += chunk) {
    const int64_t n = pg__min(chunk, bytes - done);
    PG_TRY(pg_safetensors_read(file, entry, first * row + done, buffer, n));
    PG_LAUNCH(ctx, upload, (char *)p->slots[s]->data + done, buffer, (size_t)n);
  }
fail:
  free(buffer);
  return status;
}

/* Update count and slots of one parameter. */
static int load_parameter(pg_run *run, pg_parameter *p, const json_t *recorded,
                          pg_safetensors *slots, const char *path, pg_slots_policy policy) {
  pg_context *ctx = run->context;
  const pg_optimizer *o = run->assigned[p->assignment]->public.optimizer;
  int status;
  if (policy == PG_SLOTS_RESET) {
    p->updates = 0;
    for (size_t s = 0; s < o->slot_count; s++)
      PG_LAUNCH(ctx, zero, p->slots[s]->data,
                (size_t)pg_tensor_elements(p->slots[s]) * pg_dtype_size(p->slots[s]->dtype));
    return 0;
  }
  const json_t *entry = json_object_get(recorded, p->name);
  const char *name = json_string_value(json_object_get(entry, "optimizer"));
  if (!name || strcmp(name, o->name) != 0)
    return pg_fail(ctx, PG_EFORMAT,
                   "%s: %s was updated by %s, the run assigns %s; reset its slots to go on", path,
                   p->name, name ? name : "nothing", o->name);
  PG_TRY(pg__json_count(ctx, path, entry, "updates", &p->updates));
  for (size_t s = 0; s < o->slot_count; s++) {
    char *key = pg__slot_name(p, &o->slots[s]);
    if (!key) return pg_fail(ctx, PG_ENOMEM, "out of memory for the slots of %s", p->name);
    status = load_slot(run, p, s, slots, key);
    free(key);
    if (status < 0) goto fail;
  }
  return 0;
fail:
  return status;
}

/* A data position is an index into one order of optimizer batches: refused where that differs. */
static int check_data(const pg_run *run, const char *path, const json_t *saved) {
  pg_context *ctx = run->context;
  const pg_loader_options *mine = pg_loader_get_options(run->loader);
  char identity[65];
  int64_t sequences = 0, time = 0;
  const json_t *seed = json_object_get(saved, "seed");
  const char *shards = json_string_value(json_object_get(saved, "shards"));
  int status;
  PG_TRY(pg__json_count(ctx, path, saved, "sequences", &sequences));
  PG_TRY(pg__json_count(ctx, path, saved, "time", &time));
  PG_TRY(pg_shards_identity(ctx, pg_loader_shards(run->loader), identity));
  if (!json_is_integer(seed) || !shards)
    return pg_fail(ctx, PG_EFORMAT, "%s: \"data\" lacks its seed or shards", path);
  if (sequences != mine->batch || time != mine->time ||
      (uint64_t)json_integer_value(seed) != mine->seed)
    return pg_fail(
        ctx, PG_EDATA,
        "%s: its data position counts batches of %lld sequences of %lld tokens in the "
        "order of seed %llu; the run has %lld of %lld, seed %llu; restart the data to go "
        "on",
        path, (long long)sequences, (long long)time, (unsigned long long)json_integer_value(seed),
        (long long)mine->batch, (long long)mine->time, (unsigned long long)mine->seed);
  if (strcmp(shards, identity) != 0)
    return pg_fail(ctx, PG_EDATA,
                   "%s: its data position belongs to other shards (digest %.12s..., the run's have "
                   "%.12s...); restart the data to go on",
                   path, shards, identity);
  return 0;
fail:
  return status;
}

static int load_increments(pg_run *run, const char *file) {
  pg_context *ctx = run->context;
  pg_safetensors *tensors = NULL;
  int status;
  PG_TRY(pg__run_prepare(run)); /* allocates the increments that are kept */
  PG_TRY(pg_safetensors_open(ctx, file, &tensors));
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    if (p->increment && pg_safetensors_find(tensors, p->name))
      PG_TRY(pg_safetensors_read_tensor(tensors, p->name, p->increment));
  }
  status = 0;
fail:
  pg_safetensors_close(tensors);
  return status;
}

int pg_checkpoint_load(pg_run *run, const char *path, const pg_checkpoint_load_options *options,
                       char **host_state) {
  static const pg_checkpoint_load_options everything;
  pg_context *ctx = run->context;
  pg_model_config saved;
  const pg_model_config *mine = pg_model_get_config(run->model);
  char file[PG__PATH_MAX];
  json_t *state = NULL;
  pg_safetensors *slots = NULL;
  int64_t updates = 0, tokens = 0;
  pg_loader_state l = {0};
  int status;
  bool resume = !options;
  if (!options) options = &everything;
  if (host_state) *host_state = NULL;
  if (!run->loader)
    return pg_fail(ctx, PG_EINVAL,
                   "a run on given hidden states has no data position, and so no checkpoints");
  PG_TRY(pg_run_check(run));
  /* One rank is enough to hash the files. */
  PG_TRY(pg_checkpoint_verify(ctx, path, pg_comm_rank(run->comm) == 0));
  PG_TRY(pg_checkpoint_config(ctx, path, &saved));
  if (saved.layers != mine->layers || saved.width != mine->width || saved.vocab != mine->vocab ||
      saved.heads != mine->heads || saved.head_dim != mine->head_dim || saved.mlp != mine->mlp) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "%s holds a model of %lld layers, width %lld, vocabulary %lld; the run's has "
                     "%lld layers, width %lld, vocabulary %lld (or its heads or mlp differ)",
                     path, (long long)saved.layers, (long long)saved.width, (long long)saved.vocab,
                     (long long)mine->layers, (long long)mine->width, (long long)mine->vocab);
    goto fail;
  }
  if (saved.head.rank != mine->head.rank || saved.head.extra != mine->head.extra) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "%s holds a head of rank %lld (0: one matrix) with %lld extra classes; the "
                     "run's has rank %lld and %lld extra classes",
                     path, (long long)saved.head.rank, (long long)saved.head.extra,
                     (long long)mine->head.rank, (long long)mine->head.extra);
    goto fail;
  }
  if (resume && (saved.head.backward_rank != mine->head.backward_rank ||
                 saved.head.backward_seed != mine->head.backward_seed ||
                 saved.head.drop_residual != mine->head.drop_residual)) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "%s was trained with model.head.backward_rank %lld (seed %lld), residual %s; "
                     "the run has %lld (seed %lld), %s",
                     path, (long long)saved.head.backward_rank, (long long)saved.head.backward_seed,
                     saved.head.drop_residual ? "off" : "on", (long long)mine->head.backward_rank,
                     (long long)mine->head.backward_seed, mine->head.drop_residual ? "off" : "on");
    goto fail;
  }
  /* A fork may change these on purpose; a resume would continue another function. */
  if (resume && (saved.norm_eps != mine->norm_eps || saved.rope_base != mine->rope_base ||
                 saved.logit_scale != mine->logit_scale)) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "%s was trained with norm_eps %g, rope_base %g, logit_scale %g; the run has "
                     "%g, %g, %g",
                     path, saved.norm_eps, saved.rope_base, saved.logit_scale, mine->norm_eps,
                     mine->rope_base, mine->logit_scale);
    goto fail;
  }

  PG_TRY(pg__join(ctx, path, "state.json", file));
  PG_TRY(pg__json_load(ctx, file, JSON_LIMIT, &state));
  int64_t format = 0;
  PG_TRY(pg__json_count(ctx, file, state, "format", &format));
  if (format != PG__CHECKPOINT_FORMAT) {
    status = pg_fail(ctx, PG_EFORMAT, "%s has format %lld; this version reads %d", file,
                     (long long)format, PG__CHECKPOINT_FORMAT);
    goto fail;
  }
  PG_TRY(pg__json_count(ctx, file, state, "update", &updates));
  PG_TRY(pg__json_count(ctx, file, state, "tokens", &tokens));
  const json_t *data = json_object_get(state, "data");
  PG_TRY(pg__json_count(ctx, file, data, "epoch", &l.epoch));
  PG_TRY(pg__json_count(ctx, file, data, "shard_position", &l.shard_position));
  PG_TRY(pg__json_count(ctx, file, data, "batch_position", &l.batch_position));
  PG_TRY(pg__json_count(ctx, file, data, "batches", &l.batches));
  if (!options->restart_data) PG_TRY(check_data(run, file, data));

  PG_TRY(pg__join(ctx, path, "optimizer.safetensors", file));
  PG_TRY(pg_safetensors_open(ctx, file, &slots));
  run->torn = true; /* until everything is in place */
  run->have_gradients = false;
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    pg_parameter *p = pg_model_parameter(run->model, i);
    PG_TRY(load_parameter(run, p, json_object_get(state, "parameters"), slots, path,
                          options->slots[p->role]));
  }
  PG_TRY(pg__join(ctx, path, "model.safetensors", file));
  PG_TRY(pg_model_load(run->model, file));
  PG_TRY(pg__join(ctx, path, "increment.safetensors", file));
  PG_TRY(load_increments(run, file));
  if (!options->restart_data) PG_TRY(pg_loader_set_state(run->loader, &l));
  run->updates = updates;
  run->tokens = tokens;
  if (host_state && !(*host_state = pg__json_print(json_object_get(state, "host"), 0))) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for the host's state");
    goto fail;
  }
  run->torn = false;
  status = 0;
fail:
  pg_safetensors_close(slots);
  json_decref(state);
  return status;
}
