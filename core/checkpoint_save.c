/* Writing checkpoints: everything under a temporary name, synced, then one rename. */
#include "checkpoint_internal.h"
#include "files.h"
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int pg__join(pg_context *ctx, const char *folder, const char *name, char out[PG__PATH_MAX]) {
  int n = snprintf(out, PG__PATH_MAX, "%s/%s", folder, name);
  if (n < 0 || n >= PG__PATH_MAX)
    return pg_fail(ctx, PG_EINVAL, "the path %.80s... is longer than %d bytes", folder,
                   PG__PATH_MAX - 1);
  return 0;
}

char *pg__slot_name(const pg_parameter *p, const pg_slot *slot) {
  size_t size = strlen(p->name) + strlen(slot->name) + 2;
  char *name = malloc(size);
  if (name) snprintf(name, size, "%s.%s", p->name, slot->name);
  return name;
}

static int write_json(pg_context *ctx, const char *path, json_t *value /* stolen */) {
  int status;
  char *text = value ? pg__json_print(value, 2) : NULL;
  if (!text) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for %s", path);
    goto fail;
  }
  PG_TRY(pg_file_write_atomic(ctx, path, text, strlen(text)));
  status = 0;
fail:
  free(text);
  json_decref(value);
  return status;
}

/* All of a slot whose parts are on several ranks. */
typedef struct gathered {
  const pg_run *run;
  const pg_parameter *parameter;
  size_t slot;
} gathered;

static int gather(const pg_named_tensor *item, pg_tensor **out) {
  const gathered *g = item->self;
  return pg_run_gather_slot(g->run, g->parameter, g->slot, out);
}

/* Slots in the order of the parameters, as safetensors. All ranks bring their parts; the first one
 * writes, the others have no path. */
static int write_slots(const pg_run *run, const char *path) {
  pg_context *ctx = run->context;
  size_t total = pg_model_count(run->model) * PG_MAX_SLOTS, used = 0;
  int status;
  pg_named_tensor *list = calloc(total + 1, sizeof *list);
  gathered *parts = calloc(total + 1, sizeof *parts);
  if (!list || !parts) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for a list of slots");
    goto fail;
  }
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    const pg_optimizer *o = run->assigned[p->assignment]->public.optimizer;
    for (size_t s = 0; s < o->slot_count; s++) {
      char *name = pg__slot_name(p, &o->slots[s]);
      if (!name) {
        status = pg_fail(ctx, PG_ENOMEM, "out of memory for the slots of %s", p->name);
        goto fail;
      }
      pg_named_tensor *item = &list[used];
      item->name = name;
      if (run->sharded) {
        parts[used] = (gathered){run, p, s};
        item->make = gather;
        item->self = &parts[used];
        item->dtype = o->slots[s].dtype;
        item->ndim = pg_slot_dims(&o->slots[s], p->rows, p->columns, item->shape);
      } else {
        item->tensor = p->slots[s];
      }
      used++;
    }
  }
  if (path) PG_TRY(pg_safetensors_write(ctx, path, list, used, NULL));
  for (size_t i = 0; !path && run->sharded && i < used; i++) {
    pg_tensor *t;
    PG_TRY(gather(&list[i], &t));
    pg_tensor_free(t);
  }
  status = 0;
fail:
  for (size_t i = 0; list && i < used; i++) free((char *)list[i].name);
  free(list);
  free(parts);
  return status;
}

static int write_increments(const pg_run *run, const char *path) {
  size_t count = pg_model_count(run->model), used = 0;
  pg_named_tensor *list = calloc(count + 1, sizeof *list);
  if (!list) return pg_fail(run->context, PG_ENOMEM, "out of memory for %s", path);
  for (size_t i = 0; i < count; i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (p->increment) list[used++] = (pg_named_tensor){.name = p->name, .tensor = p->increment};
  }
  int status = pg_safetensors_write(run->context, path, list, used, NULL);
  free(list);
  return status;
}

static int write_state(const pg_run *run, const char *path, const char *host_state) {
  pg_context *ctx = run->context;
  const pg_loader_options *data = pg_loader_get_options(run->loader);
  char identity[65];
  pg_loader_state l;
  json_t *host = NULL, *parameters = json_object(), *state = NULL;
  int status;
  if (host_state)
    PG_TRY(pg__json_parse(ctx, host_state, strlen(host_state), "the host's state", &host));
  else
    host = json_null();
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    json_object_set_new(parameters, p->name,
                        json_pack("{s:s, s:I}", "optimizer",
                                  run->assigned[p->assignment]->public.optimizer->name, "updates",
                                  (json_int_t)p->updates));
  }
  pg_loader_get_state(run->loader, &l);
  PG_TRY(pg_shards_identity(ctx, pg_loader_shards(run->loader), identity));
  /* The position means something only in this order of these shards: what decides it is kept. */
  state = json_pack(
      "{s:i, s:s, s:I, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s}, s:O, s:O}", //
      "format", PG__CHECKPOINT_FORMAT, "perigee", PG_VERSION, "update", (json_int_t)run->updates,
      "tokens", (json_int_t)run->tokens, "data", "epoch", (json_int_t)l.epoch, "shard_position",
      (json_int_t)l.shard_position, "batch_position", (json_int_t)l.batch_position, "batches",
      (json_int_t)l.batches, "sequences", (json_int_t)data->batch, "time", (json_int_t)data->time,
      "seed", (json_int_t)data->seed, "shards", identity, "parameters", parameters, "host", host);
  PG_TRY(write_json(ctx, path, state));
  status = 0;
fail:
  json_decref(parameters);
  json_decref(host);
  return status;
}

static int copy_file(pg_context *ctx, const char *from, const char *to) {
  char *data = NULL;
  size_t size;
  int status;
  PG_TRY(pg_file_read(ctx, from, (int64_t)1 << 30, &data, &size));
  PG_TRY(pg_file_write_atomic(ctx, to, data, size));
  status = 0;
fail:
  free(data);
  return status;
}

static int write_manifest(pg_context *ctx, const char *folder, const char *const *names,
                          size_t count) {
  char path[PG__PATH_MAX];
  json_t *files = json_object();
  int status;
  for (size_t i = 0; i < count; i++) {
    struct stat st;
    char hex[65];
    PG_TRY(pg__join(ctx, folder, names[i], path));
    if (stat(path, &st) != 0) {
      status = pg_fail(ctx, PG_EIO, "%s: %s", path, strerror(errno));
      goto fail;
    }
    PG_TRY(pg_file_sha256(ctx, path, hex));
    json_object_set_new(files, names[i],
                        json_pack("{s:I, s:s}", "bytes", (json_int_t)st.st_size, "sha256", hex));
  }
  PG_TRY(pg__join(ctx, folder, "manifest.json", path));
  PG_TRY(write_json(ctx, path,
                    json_pack("{s:i, s:O}", "format", PG__CHECKPOINT_FORMAT, "files", files)));
  status = 0;
fail:
  json_decref(files);
  return status;
}

/* A run that diverged in its last update would fail at its next one; its last finite checkpoint is
 * worth more than a newer one that cannot continue. The ranks decide together. */
static int check_weights(const pg_run *run) {
  pg_context *ctx = run->context;
  const size_t count = pg_model_count(run->model);
  double *sum = NULL, host, bad = 0; /* parameters from the first bad one to the last */
  int status;
  PG_TRY(pg__alloc(ctx, sizeof *sum, "a check of the weights", (void **)&sum));
  for (size_t i = 0; i < count && bad == 0; i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    PG_LAUNCH(ctx, sum, p->value->data, p->rows * p->columns, false, sum);
    PG_LAUNCH(ctx, download, &host, sum, sizeof host);
    if (!isfinite(host)) bad = (double)(count - i);
  }
  PG_TRY(pg_comm_meet(run->comm, ctx, "a checkpoint", &bad, 1));
  if (bad > 0)
    status = pg_fail(
        ctx, PG_ENONFINITE, "the weights of %s are not finite after update %lld: nothing was saved",
        pg_model_parameter(run->model, count - (size_t)bad)->name, (long long)run->updates);
fail:
  pg__release(ctx, sum, sizeof *sum);
  return status;
}

static int64_t bytes_needed(const pg_run *run, const pg_checkpoint_options *options) {
  int64_t bytes = (int64_t)4 << 20; /* JSON files, headers, tokenizer */
  for (size_t i = 0; options && i < options->tensor_count; i++)
    bytes += pg_tensor_elements(options->tensors[i].tensor) *
             (int64_t)pg_dtype_size(options->tensors[i].tensor->dtype);
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    const pg_optimizer *o = run->assigned[p->assignment]->public.optimizer;
    bytes += p->rows * p->columns * (int64_t)sizeof(float) * (p->increment ? 2 : 1);
    for (size_t s = 0; s < o->slot_count; s++) {
      int64_t shape[2];
      pg_slot_dims(&o->slots[s], p->rows, p->columns, shape);
      bytes += shape[0] * shape[1] * (int64_t)pg_dtype_size(o->slots[s].dtype);
    }
  }
  return bytes;
}

/* A name that is taken may be replaced only when a checkpoint stands there. */
static int check_target(pg_context *ctx, const char *path) {
  char manifest[PG__PATH_MAX];
  struct stat st;
  if (lstat(path, &st) != 0) {
    if (errno == ENOENT) return 0;
    return pg__fail_errno(ctx, "look at", path, errno);
  }
  int status = pg__join(ctx, path, "manifest.json", manifest);
  if (status < 0) return status;
  if (S_ISDIR(st.st_mode) && lstat(manifest, &st) == 0) return 0;
  return pg_fail(ctx, PG_EEXIST, "%s exists and is no checkpoint: nothing was saved over it", path);
}

/* Put the finished folder in its place. An older checkpoint of that name is exchanged in one step,
 * so that at every moment one of the two stands under the name; on file systems that cannot
 * exchange (NFS) it is moved aside first, to PATH.old-PID. */
static int publish(pg_context *ctx, const char *temporary, const char *path) {
  char parent[PG__PATH_MAX], old[PG__PATH_MAX + 32];
  if (rename(temporary, path) != 0) {
    if (errno != EEXIST && errno != ENOTEMPTY) return pg__fail_errno(ctx, "save", path, errno);
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) == 0) {
      pg_file_remove_tree(ctx, temporary); /* the old one; what stays of it harms nobody */
    } else {
      snprintf(old, sizeof old, "%s.old-%ld", path, (long)getpid());
      if (rename(path, old) != 0) return pg__fail_errno(ctx, "replace", path, errno);
      if (rename(temporary, path) != 0) {
        int reason = errno;
        rename(old, path);
        return pg__fail_errno(ctx, "save", path, reason);
      }
      pg_file_remove_tree(ctx, old);
    }
  }
  snprintf(parent, sizeof parent, "%s", path);
  char *slash = strrchr(parent, '/');
  if (slash == parent) slash++;
  if (slash) *slash = 0;
  return pg_file_sync(ctx, slash ? parent : ".");
}

static int save(const pg_run *run, const char *path, const pg_checkpoint_options *options) {
  pg_context *ctx = run->context;
  char temporary[PG__PATH_MAX], file[PG__PATH_MAX];
  const char *names[7] = {"config.json", "model.safetensors", "optimizer.safetensors",
                          "increment.safetensors", "state.json"};
  size_t count = 5;
  int status;
  int n = snprintf(temporary, sizeof temporary, "%s.tmp-%ld", path, (long)getpid());
  if (n < 0 || n >= (int)sizeof temporary)
    return pg_fail(ctx, PG_EINVAL, "the path %.80s... is too long", path);
  PG_TRY(check_target(ctx, path));
  PG_TRY(pg_file_remove_tree(ctx, temporary));
  PG_TRY(pg_file_make_folders(ctx, temporary));
  PG_TRY(pg_file_require_space(ctx, temporary, bytes_needed(run, options)));

  PG_TRY(pg__join(ctx, temporary, "config.json", file));
  PG_TRY(write_json(ctx, file, pg__model_config_json(pg_model_get_config(run->model))));
  PG_TRY(pg__join(ctx, temporary, "model.safetensors", file));
  PG_TRY(pg_model_save(run->model, file));
  PG_TRY(pg__join(ctx, temporary, "optimizer.safetensors", file));
  PG_TRY(write_slots(run, file));
  PG_TRY(pg__join(ctx, temporary, "increment.safetensors", file));
  PG_TRY(write_increments(run, file));
  PG_TRY(pg__join(ctx, temporary, "state.json", file));
  PG_TRY(write_state(run, file, options ? options->host_state : NULL));
  if (options && options->tokenizer) {
    PG_TRY(pg__join(ctx, temporary, "tokenizer.json", file));
    PG_TRY(copy_file(ctx, options->tokenizer, file));
    names[count++] = "tokenizer.json";
  }
  if (options && options->tensor_count) {
    PG_TRY(pg__join(ctx, temporary, "host.safetensors", file));
    PG_TRY(pg_safetensors_write(ctx, file, options->tensors, options->tensor_count, NULL));
    names[count++] = "host.safetensors";
  }
  PG_TRY(write_manifest(ctx, temporary, names, count));
  PG_TRY(pg_file_sync(ctx, temporary));
  PG_TRY(publish(ctx, temporary, path));
  return 0;
fail : {
  char message[sizeof ctx->message];
  memcpy(message, ctx->message, sizeof message);
  pg_file_remove_tree(ctx, temporary);
  memcpy(ctx->message, message, sizeof message);
  return status;
}
}

int pg_checkpoint_save(const pg_run *run, const char *path, const pg_checkpoint_options *options) {
  pg_context *ctx = run->context;
  int status;
  if (run->torn)
    return pg_fail(ctx, PG_ESTATE,
                   "update %lld failed halfway, so there is no state to save; go "
                   "on from the last checkpoint",
                   (long long)(run->updates + 1));
  if (!run->loader)
    return pg_fail(ctx, PG_EINVAL,
                   "a run on given hidden states has no data position, and so no checkpoints");
  PG_TRY(pg_run_check((pg_run *)run));
  if ((status = check_weights(run)) == PG_ENONFINITE) return status; /* on all ranks */
  PG_TRY(status);
  if (pg_comm_rank(run->comm) == 0)
    PG_TRY(save(run, path, options));
  else
    PG_TRY(write_slots(run, NULL));
  PG_TRY(pg_comm_meet(run->comm, ctx, "a checkpoint on disk", NULL, 0));
  return 0;
fail:
  pg_comm_fail(run->comm, pg_context_message(ctx));
  return status;
}
