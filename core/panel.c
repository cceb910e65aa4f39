/* Panels: which validation positions the Hilbert diagnostic looks at (SPEC §4).
 *
 * The sequential validation stream comes in groups of micro * ranks sequences, of which rank r
 * reads the r-th micro; rank r contributes the first positions of what it reads, flattened, or of
 * sequences spread evenly over what it could read. The panel keeps the tokens of those positions
 * and the next one of each, in the order of the ranks. */
#include "panel.h"

#include "files.h"

#include <stdlib.h>
#include <string.h>

void pg_panel_free(pg_panel *panel) {
  if (!panel) return;
  free(panel->ids);
  free(panel->targets);
  free(panel->pieces);
  free(panel);
}

int64_t pg_panel_tokens(const pg_panel *panel) {
  return panel->tokens;
}

const char *pg_panel_hash(const pg_panel *panel) {
  return panel->hash;
}

size_t pg_panel_sequences(const pg_panel *panel) {
  return panel->count;
}

int64_t pg_panel_length(const pg_panel *panel, size_t sequence) {
  return panel->pieces[sequence].length;
}

int64_t pg_panel_context(const pg_panel *panel, int64_t position, int64_t n, const int32_t **ids,
                         int32_t *target) {
  const pg_panel_piece *piece = panel->pieces;
  while (position >= piece->first + piece->length) piece++;
  const int64_t count = pg__min(n, position + 1 - piece->first);
  *ids = panel->ids + position + 1 - count;
  *target = panel->targets[position];
  return count;
}

static void put_little_endian(unsigned char *to, uint64_t x, size_t bytes) {
  for (size_t k = 0; k < bytes; k++) to[k] = (unsigned char)(x >> (8 * k));
}

/* SHA-256, cut to 64 bits, over tokens, ranks, micro, time, and 1 when spread, as int64 and all ids
 * as int32, all little-endian. */
static int set_hash(pg_context *ctx, pg_panel *p) {
  const size_t numbers = p->spread ? 5 : 4, head = 8 * numbers;
  size_t size = head + (size_t)p->tokens * 4;
  unsigned char *bytes = malloc(size);
  char hex[65];
  if (!bytes) return pg_fail(ctx, PG_ENOMEM, "no memory to hash a panel of %zu bytes", size);
  const int64_t options[5] = {p->tokens, p->ranks, p->micro, p->time, 1};
  for (size_t i = 0; i < numbers; i++) put_little_endian(bytes + 8 * i, (uint64_t)options[i], 8);
  for (int64_t i = 0; i < p->tokens; i++)
    put_little_endian(bytes + head + 4 * (size_t)i, (uint32_t)p->ids[i], 4);
  pg_sha256(bytes, size, hex);
  free(bytes);
  memcpy(p->hash, hex, 16);
  p->hash[16] = 0;
  return 0;
}

/* Positions that rank `rank` contributes. */
static int64_t share(int64_t tokens, int64_t ranks, int64_t rank) {
  return tokens / ranks + (rank < tokens % ranks);
}

/* NULL when there is no memory. */
static pg_panel *allocate(int64_t tokens, int64_t ranks, int64_t micro, int64_t time, bool spread) {
  pg_panel *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  /* Every rank adds whole sequences and one prefix at most. */
  size_t pieces = (size_t)(tokens / time + pg__min(ranks, tokens));
  *p = (pg_panel){.tokens = tokens, .ranks = ranks, .micro = micro, .time = time, .spread = spread};
  p->ids = malloc((size_t)tokens * sizeof *p->ids);
  p->targets = malloc((size_t)tokens * sizeof *p->targets);
  p->pieces = malloc(pieces * sizeof *p->pieces);
  if (p->ids && p->targets && p->pieces) return p;
  pg_panel_free(p);
  return NULL;
}

/* Append the first `length` positions of sequence s of a micro-batch [micro * time]. */
static void append(pg_panel *p, int64_t s, int64_t length, int64_t *filled, const int32_t *inputs,
                   const int32_t *targets) {
  memcpy(p->ids + *filled, inputs + s * p->time, (size_t)length * sizeof *p->ids);
  memcpy(p->targets + *filled, targets + s * p->time, (size_t)length * sizeof *p->targets);
  p->pieces[p->count++] = (pg_panel_piece){length, *filled};
  *filled += length;
}

/* Append the first `need` positions of what `loader` reads. inputs, targets: [micro * time]. */
static int take(pg_panel *p, pg_loader *loader, int64_t need, int64_t *filled, int32_t *inputs,
                int32_t *targets) {
  while (need > 0) {
    int status = pg_loader_next(loader, inputs, targets);
    if (status < 0) return status;
    for (int64_t s = 0; s < p->micro && need > 0; s++) {
      int64_t length = pg__min(need, p->time);
      append(p, s, length, filled, inputs, targets);
      need -= length;
    }
  }
  return 0;
}

/* Before group `group` of a sequential loader. */
static int seek(pg_loader *loader, int64_t group) {
  const pg_shards *s = pg_loader_shards(loader);
  const pg_loader_options *o = pg_loader_get_options(loader);
  pg_loader_state at = {.batches = group};
  for (;; at.shard_position++) {
    const int64_t here = (s->shards[at.shard_position].tokens - 1) / o->time / o->batch;
    if (group < here) break;
    group -= here;
  }
  at.batch_position = group;
  return pg_loader_set_state(loader, &at);
}

/* The same from sequences at even distances. */
static int take_spread(pg_panel *p, pg_loader *loader, int64_t need, int64_t *filled,
                       int32_t *inputs, int32_t *targets) {
  const int64_t pieces = (need - 1) / p->time + 1, all = pg_loader_batches(loader) * p->micro;
  for (int64_t k = 0; k < pieces; k++) {
    const int64_t at = (int64_t)((__int128)k * all / pieces);
    int status = seek(loader, at / p->micro);
    if (status == 0) status = pg_loader_next(loader, inputs, targets);
    if (status < 0) return status;
    append(p, at % p->micro, pg__min(need - k * p->time, p->time), filled, inputs, targets);
  }
  return 0;
}

int pg_panel_new(pg_context *ctx, const char *folder, const char *pattern, int64_t time,
                 int64_t vocab, const pg_panel_options *options, pg_panel **out) {
  int64_t tokens = options->tokens, ranks = options->ranks ? options->ranks : 1;
  /* With one rank the groups only drop sequences at shard ends; taking them singly drops none. */
  int64_t micro = ranks > 1 && options->micro ? options->micro : 1, filled = 0;
  pg_panel *p = NULL;
  pg_loader *loader = NULL;
  int32_t *batch = NULL;
  int status = 0;

  *out = NULL;
  if (tokens < 1 || ranks < 1 || options->micro < 0 || time < 1)
    return pg_fail(ctx, PG_EINVAL,
                   "a panel of %lld tokens over %lld ranks of %lld sequences of %lld is not "
                   "possible; all must be at least 1",
                   (long long)tokens, (long long)ranks, (long long)options->micro, (long long)time);
  if (micro > INT64_MAX / 16 / time / ranks)
    return pg_fail(ctx, PG_EINVAL,
                   "a panel's groups of %lld ranks times %lld sequences are too "
                   "large",
                   (long long)ranks, (long long)micro);
  pg_loader_options o = {.folder = folder,
                         .pattern = pattern,
                         .time = time,
                         .batch = micro * ranks,
                         .micro = micro,
                         .world = ranks,
                         .vocab = vocab,
                         .depth = 1};
  PG_TRY(pg_loader_open(ctx, &o, &loader));
  /* Shares differ by one at most, rank 0's is the largest: it decides whether there is enough. */
  int64_t supplied = pg_loader_batches(loader) * micro * time;
  if (share(tokens, ranks, 0) > supplied) {
    status = pg_fail(ctx, PG_EDATA,
                     "the panel asks for %lld tokens; the validation split supplies %lld in groups "
                     "of %lld sequences of %lld",
                     (long long)tokens, (long long)(supplied * ranks), (long long)(micro * ranks),
                     (long long)time);
    goto fail;
  }
  /* So many tokens exist: memory for them is no wild demand. */
  p = allocate(tokens, ranks, micro, time, options->spread);
  batch = malloc((size_t)(2 * micro * time) * sizeof *batch);
  if (!p || !batch) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for a panel of %lld tokens", (long long)tokens);
    goto fail;
  }
  for (o.rank = 0; o.rank < pg__min(ranks, tokens); o.rank++) {
    if (!loader) PG_TRY(pg_loader_open(ctx, &o, &loader));
    const int64_t need = share(tokens, ranks, o.rank);
    PG_TRY(p->spread ? take_spread(p, loader, need, &filled, batch, batch + micro * time)
                     : take(p, loader, need, &filled, batch, batch + micro * time));
    pg_loader_close(loader);
    loader = NULL;
  }
  PG_TRY(set_hash(ctx, p));
  *out = p;
  p = NULL;
fail:
  pg_loader_close(loader);
  free(batch);
  pg_panel_free(p);
  return status;
}
