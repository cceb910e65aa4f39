/* The loader: a ring of micro-batches, read ahead by libuv's thread pool on the loader's own loop.
 *
 * Invariants: slots [head, head + filled) of the ring are the micro-batches that follow what was
 * served, in order; a slot is pending (a read is in flight), ready, or failed, and a failed one
 * stays at the head until the position is set anew. A file stays open while a slot or the cursor
 * uses it, so that a rename cannot mix two files; each served micro-batch checks that its file is
 * still the one that the loader opened. The micro sequences of a micro-batch lie side by side in a
 * shard, so each is one read of micro * time + 1 tokens. */
#include "files.h"
#include "internal.h"
#include "loader_internal.h"
#include "shards_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#define DEFAULT_DEPTH 4
#define MAX_DEPTH 4096
#define CANCEL_POLL_MS 50

typedef struct shard_file {
  int fd, users; /* fd is open while users > 0 */
  struct stat identity;
} shard_file;

typedef enum slot_phase { SLOT_EMPTY, SLOT_PENDING, SLOT_READY, SLOT_FAILED } slot_phase;

typedef struct slot {
  uv_fs_t request;
  struct pg_loader *loader;
  slot_phase phase;
  int status; /* of a failed one, with its text */
  char message[512];
  int64_t shard, token;  /* where it starts */
  int64_t micro;         /* index of the micro-batch in its optimizer batch */
  pg_loader_state after; /* position behind its optimizer batch */
  size_t done;           /* bytes read */
  uint16_t *tokens;      /* micro * time + 1 */
} slot;

struct pg_loader {
  pg_context *context;
  pg_loader_options options;
  char *folder, *pattern;
  pg_shards *shards;
  shard_file *files;
  int64_t micros; /* micro-batches per optimizer batch on this rank */
  size_t bytes;   /* of one read */

  pg__order order;      /* cursor: the batch that is read ahead next */
  int64_t order_micro;  /* its next micro-batch */
  int64_t cursor_shard; /* whose file the cursor holds open, -1: none */
  pg_loader_state state;
  int64_t served_micro; /* next micro-batch to serve of the current optimizer batch */
  uint64_t hash;

  slot *slots;
  int head, filled;
  bool discarding;
  uv_loop_t loop;
  uv_timer_t timer;
  bool loop_open;
  uint64_t wait_ns;
};

/* ---- files ----------------------------------------------------------------------------------- */
static int changed(pg_loader *l, int64_t shard, const char *how) {
  return pg_fail(l->context, PG_EFORMAT, "shard %s %s while in use", l->shards->shards[shard].path,
                 how);
}

static int compare_identity(pg_loader *l, int64_t shard, const struct stat *now) {
  const struct stat *then = &l->files[shard].identity;
  if (now->st_size != then->st_size)
    return pg_fail(l->context, PG_EFORMAT,
                   "shard %s changed while in use: its size was %lld bytes and is %lld",
                   l->shards->shards[shard].path, (long long)then->st_size,
                   (long long)now->st_size);
  if (now->st_dev != then->st_dev || now->st_ino != then->st_ino)
    return changed(l, shard, "was replaced by another file");
  if (now->st_mtim.tv_sec != then->st_mtim.tv_sec || now->st_mtim.tv_nsec != then->st_mtim.tv_nsec)
    return changed(l, shard, "was written to");
  return 0;
}

/* Is the open file, and what its path names now, still what the loader began with? */
static int file_unchanged(pg_loader *l, int64_t shard) {
  struct stat now;
  const char *path = l->shards->shards[shard].path;
  if (fstat(l->files[shard].fd, &now) < 0)
    return pg_fail(l->context, PG_EIO, "shard %s cannot be examined: %s", path, strerror(errno));
  int status = compare_identity(l, shard, &now);
  if (status < 0) return status;
  if (stat(path, &now) < 0)
    return errno == ENOENT ? changed(l, shard, "was removed")
                           : pg_fail(l->context, PG_EIO, "shard %s cannot be examined: %s", path,
                                     strerror(errno));
  return compare_identity(l, shard, &now);
}

static int file_use(pg_loader *l, int64_t shard) {
  shard_file *file = &l->files[shard];
  if (file->users == 0) {
    const char *path = l->shards->shards[shard].path;
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0)
      return errno == ENOENT ? changed(l, shard, "was removed")
                             : pg_fail(l->context, PG_EIO, "shard %s cannot be opened: %s", path,
                                       strerror(errno));
    int status = file_unchanged(l, shard);
    if (status < 0) {
      close(file->fd);
      return status;
    }
  }
  file->users++;
  return 0;
}

static void file_leave(pg_loader *l, int64_t shard) {
  if (shard >= 0 && --l->files[shard].users == 0) close(l->files[shard].fd);
}

/* ---- reading ahead --------------------------------------------------------------------------- */
static void slot_fail(slot *s, int status) {
  s->phase = SLOT_FAILED;
  s->status = status;
  snprintf(s->message, sizeof s->message, "%s", pg_context_message(s->loader->context));
}

static void slot_read(slot *s);

static void on_read(uv_fs_t *request) {
  slot *s = request->data;
  pg_loader *l = s->loader;
  ssize_t result = request->result;
  uv_fs_req_cleanup(request);
  if (l->discarding) {
    s->phase = SLOT_READY;
  } else if (result == UV_EINTR || result == UV_EAGAIN) {
    slot_read(s);
  } else if (result < 0) {
    slot_fail(s, pg_fail(l->context, PG_EIO, "shard %s cannot be read at offset %lld: %s",
                         l->shards->shards[s->shard].path, (long long)s->token,
                         uv_strerror((int)result)));
  } else if (result == 0) {
    slot_fail(s, pg_fail(l->context, PG_EFORMAT,
                         "shard %s was truncated while in use: it ends before offset %lld",
                         l->shards->shards[s->shard].path,
                         (long long)(s->token + (int64_t)(l->bytes / 2))));
  } else {
    s->done += (size_t)result;
    if (s->done < l->bytes)
      slot_read(s);
    else
      s->phase = SLOT_READY;
  }
}

/* Queue the rest of the slot's read. The kernel answers with less than 2 GiB at a time and may
 * answer with less than asked for; on_read then comes back here. */
static void slot_read(slot *s) {
  pg_loader *l = s->loader;
  size_t left = l->bytes - s->done;
  uv_buf_t buffer = uv_buf_init((char *)s->tokens + s->done, 0);
  buffer.len = left < (1u << 30) ? left : (1u << 30);
  s->request.data = s;
  s->phase = SLOT_PENDING;
  int code = uv_fs_read(&l->loop, &s->request, l->files[s->shard].fd, &buffer, 1,
                        PG_SHARD_HEADER + 2 * s->token + (int64_t)s->done, on_read);
  if (code < 0)
    slot_fail(s, pg_fail(l->context, PG_EIO, "shard %s: a read cannot be queued: %s",
                         l->shards->shards[s->shard].path, uv_strerror(code)));
}

/* Queue reads until the ring is full, the data ends, or a slot has failed. */
static void read_ahead(pg_loader *l) {
  const pg_loader_options *o = &l->options;
  while (l->filled < o->depth && !pg__order_ended(&l->order)) {
    if (l->filled > 0 && l->slots[(l->head + l->filled - 1) % o->depth].phase == SLOT_FAILED)
      return;
    slot *s = &l->slots[(l->head + l->filled) % o->depth];
    int64_t sequence;
    pg__order_current(&l->order, &s->shard, &sequence);
    sequence += l->order_micro * o->micro * o->world + o->rank * o->micro;
    s->token = sequence * o->time;
    s->micro = l->order_micro;
    s->done = 0;
    l->filled++;
    int status = 0;
    if (l->cursor_shard != s->shard) {
      file_leave(l, l->cursor_shard);
      l->cursor_shard = -1;
      if ((status = file_use(l, s->shard)) == 0) l->cursor_shard = s->shard;
    }
    if (status < 0) {
      slot_fail(s, status);
      s->shard = -1; /* holds no file */
      return;
    }
    l->files[s->shard].users++;
    slot_read(s);
    if (++l->order_micro == l->micros) {
      l->order_micro = 0;
      pg__order_advance(&l->order);
    }
    s->after = l->order.at;
  }
}

static void ignore_timer(uv_timer_t *timer) {
  (void)timer; /* it only ends uv_run, so that the cancel flag is looked at */
}

/* Run the loop until the slot is no longer pending; the time is the wait that metrics report. */
static int wait_for(pg_loader *l, slot *s) {
  uv_run(&l->loop, UV_RUN_NOWAIT);
  if (s->phase != SLOT_PENDING) return 0;
  uint64_t start = uv_hrtime();
  int status = 0;
  uv_update_time(&l->loop);
  uv_timer_start(&l->timer, ignore_timer, CANCEL_POLL_MS, CANCEL_POLL_MS);
  while (s->phase == SLOT_PENDING && status == 0) {
    uv_run(&l->loop, UV_RUN_ONCE);
    if (s->phase == SLOT_PENDING && pg_context_cancelled(l->context))
      status = pg_fail(l->context, PG_ECANCELED, "waiting for shard %s was cancelled",
                       l->shards->shards[s->shard].path);
  }
  uv_timer_stop(&l->timer);
  l->wait_ns += uv_hrtime() - start;
  return status;
}

static void slot_pop(pg_loader *l) {
  slot *s = &l->slots[l->head];
  file_leave(l, s->shard);
  s->phase = SLOT_EMPTY;
  l->head = (l->head + 1) % l->options.depth;
  l->filled--;
}

/* Drop everything read ahead; reads that a thread has begun are waited for. */
static void discard(pg_loader *l) {
  l->discarding = true;
  for (int i = 0; i < l->filled; i++) {
    slot *s = &l->slots[(l->head + i) % l->options.depth];
    if (s->phase == SLOT_PENDING) uv_cancel((uv_req_t *)&s->request);
  }
  while (l->filled > 0) {
    while (l->slots[l->head].phase == SLOT_PENDING) uv_run(&l->loop, UV_RUN_ONCE);
    slot_pop(l);
  }
  l->discarding = false;
  file_leave(l, l->cursor_shard);
  l->cursor_shard = -1;
}

/* ---- opening --------------------------------------------------------------------------------- */
static int check_options(pg_context *ctx, pg_loader_options *o) {
  const struct {
    const char *name;
    int64_t value, least;
  } fields[] = {{"time", o->time, 1},   {"micro", o->micro, 1}, {"world", o->world, 1},
                {"vocab", o->vocab, 1}, {"rank", o->rank, 0},   {"depth", o->depth, 0}};
  for (size_t i = 0; i < PG_COUNT(fields); i++)
    if (fields[i].value < fields[i].least)
      return pg_fail(ctx, PG_EINVAL, "loader: %s is %lld, allowed is %lld or more", fields[i].name,
                     (long long)fields[i].value, (long long)fields[i].least);
  if (o->rank >= o->world)
    return pg_fail(ctx, PG_EINVAL, "loader: rank is %lld, allowed are 0 to %lld",
                   (long long)o->rank, (long long)o->world - 1);
  if (o->depth > MAX_DEPTH)
    return pg_fail(ctx, PG_EINVAL, "loader: depth is %d, allowed are 0 to %d", o->depth, MAX_DEPTH);
  if (o->depth == 0) o->depth = DEFAULT_DEPTH;
  int64_t group;
  if (__builtin_mul_overflow(o->micro, o->world, &group))
    return pg_fail(ctx, PG_EINVAL, "loader: micro %lld times world %lld is too large",
                   (long long)o->micro, (long long)o->world);
  if (!o->shuffle) o->batch = group;
  if (o->batch < 1 || o->batch % group != 0)
    return pg_fail(ctx, PG_EINVAL,
                   "loader: a batch of %lld sequences does not divide into micro-batches of %lld "
                   "on %lld ranks",
                   (long long)o->batch, (long long)o->micro, (long long)o->world);
  return 0;
}

static int remember_identities(pg_loader *l) {
  for (size_t i = 0; i < l->shards->count; i++) {
    const pg_shard *shard = &l->shards->shards[i];
    if (stat(shard->path, &l->files[i].identity) < 0)
      return pg_fail(l->context, PG_EIO, "shard %s cannot be examined: %s", shard->path,
                     strerror(errno));
    if (l->files[i].identity.st_size != shard->bytes)
      return changed(l, (int64_t)i, "was written to");
  }
  return 0;
}

int pg_loader_open(pg_context *ctx, const pg_loader_options *options, pg_loader **out) {
  int status;
  *out = NULL;
  pg_loader *l = calloc(1, sizeof *l);
  if (!l) return pg_fail(ctx, PG_ENOMEM, "no memory for a loader");
  l->context = ctx;
  l->options = *options;
  l->cursor_shard = -1;
  pg_loader_options *o = &l->options;
  PG_TRY(check_options(ctx, o));
  o->folder = l->folder = strdup(options->folder);
  o->pattern = l->pattern = strdup(options->pattern);
  if (!l->folder || !l->pattern) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a loader"));
  PG_TRY(pg_shards_open(ctx, o->folder, o->pattern, &l->shards));
  /* After this a batch fits into a shard, so the products below cannot overflow. */
  PG_TRY(pg__order_init(ctx, &l->order, l->shards, o));
  l->state = l->order.at;
  l->micros = o->batch / (o->micro * o->world);
  l->bytes = (size_t)(o->micro * o->time + 1) * sizeof(uint16_t);
  l->files = calloc(l->shards->count, sizeof *l->files);
  l->slots = calloc((size_t)o->depth, sizeof *l->slots);
  if (!l->files || !l->slots) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a loader"));
  PG_TRY(remember_identities(l));
  for (int i = 0; i < o->depth; i++) {
    l->slots[i].loader = l;
    l->slots[i].tokens = malloc(l->bytes);
    if (!l->slots[i].tokens)
      PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to read %d micro-batches of %zu bytes ahead",
                     o->depth, l->bytes));
  }
  int code = uv_loop_init(&l->loop);
  if (code < 0) PG_TRY(pg_fail(ctx, PG_EIO, "no event loop for the loader: %s", uv_strerror(code)));
  l->loop_open = true;
  uv_timer_init(&l->loop, &l->timer);
  read_ahead(l);
  *out = l;
  return 0;
fail:
  pg_loader_close(l);
  return status;
}

void pg_loader_close(pg_loader *loader) {
  if (!loader) return;
  if (loader->loop_open) {
    discard(loader);
    uv_close((uv_handle_t *)&loader->timer, NULL);
    uv_run(&loader->loop, UV_RUN_DEFAULT);
    uv_loop_close(&loader->loop);
  }
  for (int i = 0; loader->slots && i < loader->options.depth; i++) free(loader->slots[i].tokens);
  free(loader->slots);
  free(loader->files);
  pg__order_free(&loader->order);
  pg_shards_free(loader->shards);
  free(loader->folder);
  free(loader->pattern);
  free(loader);
}

/* ---- serving --------------------------------------------------------------------------------- */
static inline uint64_t mix(uint64_t h) { /* the finaliser of splitmix64: a bijection */
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

static inline void hash_block(uint64_t lane[4], const uint64_t word[4]) {
  for (int k = 0; k < 4; k++) {
    lane[k] = (lane[k] ^ word[k]) * 0x9e3779b97f4a7c15u;
    lane[k] ^= lane[k] >> 32;
  }
}

/* Hash of (index in the optimizer batch, count tokens). Four lanes of 64-bit words, each step a
 * bijection of its lane, so that one changed token always changes its lane. */
static uint64_t sequence_hash(int64_t index, const uint16_t *tokens, int64_t count) {
  uint64_t lane[4], word[4];
  int64_t i = 0;
  for (uint64_t k = 0; k < 4; k++) lane[k] = mix(((uint64_t)index << 2) + k + 1);
  for (; count - i >= 16; i += 16) {
    memcpy(word, tokens + i, sizeof word);
    hash_block(lane, word);
  }
  if (i < count) {
    memset(word, 0, sizeof word);
    memcpy(word, tokens + i, (size_t)(count - i) * 2);
    hash_block(lane, word);
  }
  uint64_t h = (uint64_t)count;
  for (int k = 0; k < 4; k++) h = mix(h ^ lane[k]) + 0x9e3779b97f4a7c15u;
  return h;
}

static int check_vocabulary(pg_loader *l, const slot *s) {
  int64_t count = l->options.micro * l->options.time + 1;
  if (pg__tokens_largest(s->tokens, count) < l->options.vocab) return 0;
  int64_t i = 0;
  while (s->tokens[i] < l->options.vocab) i++;
  return pg_fail(l->context, PG_EDATA,
                 "shard %s: token id %d at offset %lld is outside the vocabulary of %lld tokens "
                 "(allowed are 0 to %lld)",
                 l->shards->shards[s->shard].path, s->tokens[i], (long long)(s->token + i),
                 (long long)l->options.vocab, (long long)l->options.vocab - 1);
}

int pg_loader_next(pg_loader *l, int32_t *inputs, int32_t *targets) {
  int status;
  const pg_loader_options *o = &l->options;
  read_ahead(l);
  if (l->filled == 0)
    return pg_fail(l->context, PG_EDATA,
                   "the data in %s (%s) has ended: all %lld groups of %lld sequences were served",
                   o->folder, o->pattern, (long long)pg_loader_batches(l), (long long)o->batch);
  slot *s = &l->slots[l->head];
  PG_TRY(wait_for(l, s));
  if (s->phase == SLOT_FAILED) PG_TRY(pg_fail(l->context, s->status, "%s", s->message));
  PG_TRY(file_unchanged(l, s->shard));
  PG_TRY(check_vocabulary(l, s));
  int64_t count = o->micro * o->time;
  for (int64_t i = 0; i < count; i++) inputs[i] = s->tokens[i];
  for (int64_t i = 0; i < count; i++) targets[i] = s->tokens[i + 1];
  if (s->micro == 0) l->hash = 0;
  for (int64_t i = 0; i < o->micro; i++)
    l->hash += sequence_hash((s->micro * o->world + o->rank) * o->micro + i,
                             s->tokens + i * o->time, o->time + 1);
  l->served_micro = s->micro + 1;
  if (l->served_micro == l->micros) {
    l->served_micro = 0;
    l->state = s->after;
  }
  slot_pop(l);
  read_ahead(l);
  return 0;
fail:
  return status;
}

int pg_loader_rewind(pg_loader *loader) {
  if (loader->options.shuffle)
    return pg_fail(loader->context, PG_ESTATE, "a shuffled loader has no start to go back to");
  return pg_loader_set_state(loader, &(pg_loader_state){0});
}

void pg_loader_get_state(const pg_loader *loader, pg_loader_state *state) {
  *state = loader->state;
}

int pg_loader_set_state(pg_loader *l, const pg_loader_state *state) {
  bool failed = l->filled > 0 && l->slots[l->head].phase == SLOT_FAILED;
  if (memcmp(state, &l->state, sizeof *state) == 0 && l->served_micro == 0 && !failed) return 0;
  int status = pg__order_seek(l->context, &l->order, state);
  if (status < 0) return status;
  discard(l);
  l->order_micro = l->served_micro = 0;
  l->state = l->order.at;
  read_ahead(l);
  return 0;
}

double pg_loader_wait_seconds(const pg_loader *loader) {
  return (double)loader->wait_ns * 1e-9;
}

uint64_t pg_loader_batch_hash(const pg_loader *loader) {
  return loader->hash;
}

int64_t pg_loader_batches(const pg_loader *loader) {
  return pg__order_batches(&loader->order);
}

const pg_shards *pg_loader_shards(const pg_loader *loader) {
  return loader->shards;
}

const pg_loader_options *pg_loader_get_options(const pg_loader *loader) {
  return &loader->options;
}
