/* Byte-level BPE: the tables of a vocabulary, and encoding.
 *
 * A piece begins as the tokens of its bytes; the adjacent pair with the lowest merge rank is
 * merged, the leftmost first, until no pair has a merge (Sennrich et al. 2016, in GPT-2's byte
 * form). A heap over a linked list does this in O(n log n) for a piece of n bytes, so that text
 * without spaces costs no more than other text; short pieces are remembered. */
#include "internal.h"
#include "tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

#define CACHE_SLOTS (1 << 16) /* 4 MiB */

typedef struct pg__symbol {
  int32_t id; /* -1: merged into the symbol before it */
  int64_t before, behind;
} pg__symbol;

typedef struct pg__candidate {
  int32_t rank;
  int64_t at; /* symbol that would take in the one behind it */
} pg__candidate;

/* ---- GPT-2's alphabet ------------------------------------------------------------------------ */
static bool printable(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

uint32_t pg__code_point_of(uint8_t byte) {
  if (printable(byte)) return byte;
  uint32_t n = 256; /* the others follow from 256 on, in order */
  for (int i = 0; i < byte; i++) n += !printable(i);
  return n;
}

int pg__byte_of(uint32_t code_point) {
  if (code_point < 256) return printable((int)code_point) ? (int)code_point : -1;
  uint32_t n = code_point - 256;
  for (int i = 0; i < 256; i++)
    if (!printable(i) && n-- == 0) return i;
  return -1;
}

void pg__byte_order(uint8_t order[256]) {
  int n = 0;
  for (int i = 0; i < 256; i++)
    if (printable(i)) order[n++] = (uint8_t)i;
  for (int i = 0; i < 256; i++)
    if (!printable(i)) order[n++] = (uint8_t)i;
}

/* ---- tables ---------------------------------------------------------------------------------- */
static uint64_t hash_bytes(const char *bytes, size_t size) {
  uint64_t h = size * 0x9e3779b97f4a7c15u, word;
  for (; size >= 8; bytes += 8, size -= 8) {
    memcpy(&word, bytes, 8);
    h = (h ^ word) * 0x9fb21c651e98df25u;
    h ^= h >> 32;
  }
  if (size) {
    word = 0;
    memcpy(&word, bytes, size);
    h = (h ^ word) * 0x9fb21c651e98df25u;
    h ^= h >> 32;
  }
  h *= 0x9e3779b97f4a7c15u;
  return h ^ h >> 29;
}

static size_t hash_pair(int32_t left, int32_t right) {
  uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
  return (size_t)(h ^ h >> 32);
}

static size_t table_size(int64_t entries) {
  size_t size = 16;
  while (size < 2 * (size_t)entries) size *= 2;
  return size;
}

static const pg__merge_slot *find_pair(const pg_tokenizer *t, int32_t left, int32_t right) {
  for (size_t h = hash_pair(left, right);; h++) {
    const pg__merge_slot *slot = &t->pairs[h & t->pair_mask];
    if (slot->left < 0) return NULL;
    if (slot->left == left && slot->right == right) return slot;
  }
}

/* Where these bytes are in the table, or the empty place where they belong. */
static size_t find_place(const pg_tokenizer *t, const char *bytes, size_t size) {
  for (size_t h = (size_t)hash_bytes(bytes, size);; h++) {
    int32_t id = t->table[h & t->table_mask];
    if (id < 0) return h & t->table_mask;
    size_t start = t->starts[id];
    if (t->starts[id + 1] - start == size && memcmp(t->bytes + start, bytes, size) == 0)
      return h & t->table_mask;
  }
}

static int fill_table(pg_tokenizer *t, const char *what) {
  size_t size = table_size(t->vocab);
  t->table_mask = size - 1;
  t->table = malloc(size * sizeof *t->table);
  if (!t->table) return pg_fail(t->context, PG_ENOMEM, "no memory for the vocabulary of %s", what);
  memset(t->table, -1, size * sizeof *t->table);
  for (int32_t id = 0; id < t->vocab; id++) {
    if (t->starts[id] == t->starts[id + 1])
      return pg_fail(t->context, PG_EFORMAT, "%s: token %d is empty", what, id);
    size_t place = find_place(t, t->bytes + t->starts[id], t->starts[id + 1] - t->starts[id]);
    if (t->table[place] >= 0)
      return pg_fail(t->context, PG_EFORMAT, "%s: tokens %d and %d have the same bytes", what,
                     t->table[place], id);
    t->table[place] = id;
  }
  for (int byte = 0; byte < 256; byte++) {
    t->byte_ids[byte] = pg_tokenizer_find(t, &(char){(char)byte}, 1);
    if (t->byte_ids[byte] < 0)
      return pg_fail(t->context, PG_EUNSUPPORTED,
                     "%s has no token for byte 0x%02x: byte-level BPE needs all 256", what, byte);
  }
  return 0;
}

static int fill_pairs(pg_tokenizer *t, const char *what) {
  size_t size = table_size(t->merge_count);
  t->pair_mask = size - 1;
  t->pairs = malloc(size * sizeof *t->pairs);
  if (!t->pairs) return pg_fail(t->context, PG_ENOMEM, "no memory for the merges of %s", what);
  memset(t->pairs, -1, size * sizeof *t->pairs);
  for (int64_t i = 0; i < t->merge_count; i++) {
    pg__merge m = t->merges[i];
    size_t left, right, result;
    const char *a = pg_tokenizer_bytes(t, m.left, &left);
    const char *b = pg_tokenizer_bytes(t, m.right, &right);
    const char *c = pg_tokenizer_bytes(t, m.result, &result);
    if (left + right != result || memcmp(c, a, left) != 0 || memcmp(c + left, b, right) != 0)
      return pg_fail(t->context, PG_EFORMAT, "%s: merge %lld of tokens %d and %d does not give %d",
                     what, (long long)i, m.left, m.right, m.result);
    if (find_pair(t, m.left, m.right))
      return pg_fail(t->context, PG_EFORMAT, "%s: merge %lld repeats an earlier one", what,
                     (long long)i);
    size_t h = hash_pair(m.left, m.right);
    while (t->pairs[h & t->pair_mask].left >= 0) h++;
    t->pairs[h & t->pair_mask] = (pg__merge_slot){m.left, m.right, (int32_t)i, m.result};
  }
  return 0;
}

int pg__tokenizer_build(pg_context *ctx, const char *what, int64_t vocab, char *bytes,
                        size_t *starts, pg__merge *merges, int64_t merge_count, pg__added *added,
                        size_t added_count, pg_tokenizer **out) {
  int status;
  pg_tokenizer *t = calloc(1, sizeof *t);
  *out = NULL;
  if (!t) {
    free(bytes);
    free(starts);
    free(merges);
    free(added);
    return pg_fail(ctx, PG_ENOMEM, "no memory for a tokenizer");
  }
  t->context = ctx;
  t->vocab = vocab;
  t->bytes = bytes;
  t->starts = starts;
  t->merges = merges;
  t->merge_count = merge_count;
  t->added = added;
  t->added_count = added_count;
  t->end_of_text = -1;
  PG_TRY(fill_table(t, what));
  PG_TRY(fill_pairs(t, what));
  int32_t id = pg_tokenizer_find(t, PG_END_OF_TEXT, strlen(PG_END_OF_TEXT));
  for (size_t i = 0; i < added_count; i++)
    if (added[i].id == id) t->end_of_text = id;
  PG_TRY(pg__pretokenizer_init(ctx, &t->pretokenizer));
  *out = t;
  return 0;
fail:
  pg_tokenizer_free(t);
  return status;
}

void pg_tokenizer_free(pg_tokenizer *t) {
  if (!t) return;
  pg__pretokenizer_free(&t->pretokenizer);
  free(t->bytes);
  free(t->starts);
  free(t->table);
  free(t->merges);
  free(t->pairs);
  free(t->added);
  free(t->cache);
  free(t->symbols);
  free(t->heap);
  free(t);
}

int64_t pg_tokenizer_vocab(const pg_tokenizer *t) {
  return t->vocab;
}

int32_t pg_tokenizer_end_of_text(const pg_tokenizer *t) {
  return t->end_of_text;
}

const char *pg_tokenizer_bytes(const pg_tokenizer *t, int32_t id, size_t *size) {
  *size = 0;
  if (id < 0 || id >= t->vocab) return NULL;
  *size = t->starts[id + 1] - t->starts[id];
  return t->bytes + t->starts[id];
}

int32_t pg_tokenizer_find(const pg_tokenizer *t, const char *bytes, size_t size) {
  return t->table[find_place(t, bytes, size)];
}

/* ---- encoding -------------------------------------------------------------------------------- */
static int out_of_memory(pg_tokenizer *t) {
  return pg_fail(t->context, PG_ENOMEM, "no memory to encode text");
}

static int reserve(pg_tokenizer *t, pg__ids *ids, int64_t more) {
  if (ids->capacity - ids->count >= more) return 0;
  int64_t capacity = pg__max(ids->count + more, ids->capacity + ids->capacity / 2 + 64);
  int32_t *larger = realloc(ids->data, (size_t)capacity * sizeof *larger);
  if (!larger) return out_of_memory(t);
  ids->data = larger;
  ids->capacity = capacity;
  return 0;
}

static int reserve_scratch(pg_tokenizer *t, size_t size) {
  if (t->symbol_capacity >= size) return 0;
  size_t capacity = size < 64 ? 64 : size + size / 2;
  free(t->symbols);
  free(t->heap);
  t->symbol_capacity = 0;
  t->symbols = malloc(capacity * sizeof *t->symbols);
  t->heap = malloc(2 * capacity * sizeof *t->heap);
  if (!t->symbols || !t->heap) return out_of_memory(t);
  t->symbol_capacity = capacity;
  return 0;
}

static bool goes_before(pg__candidate a, pg__candidate b) {
  return a.rank < b.rank || (a.rank == b.rank && a.at < b.at);
}

static void heap_sift_down(pg__candidate *heap, size_t count, size_t i) {
  pg__candidate moving = heap[i];
  for (size_t child; (child = 2 * i + 1) < count; i = child) {
    if (child + 1 < count && goes_before(heap[child + 1], heap[child])) child++;
    if (!goes_before(heap[child], moving)) break;
    heap[i] = heap[child];
  }
  heap[i] = moving;
}

static void heap_push(pg__candidate *heap, size_t *count, pg__candidate candidate) {
  size_t i = (*count)++;
  for (; i > 0 && goes_before(candidate, heap[(i - 1) / 2]); i = (i - 1) / 2)
    heap[i] = heap[(i - 1) / 2];
  heap[i] = candidate;
}

static const pg__merge_slot *merge_at(const pg_tokenizer *t, int64_t at) {
  const pg__symbol *s = &t->symbols[at];
  return s->id < 0 || s->behind < 0 ? NULL : find_pair(t, s->id, t->symbols[s->behind].id);
}

/* The merge loop for one piece. The heap holds at most 2n candidates: n - 1 at first, and each of
 * at most n - 1 merges takes one away and adds at most two. */
static int merge_piece(pg_tokenizer *t, const char *piece, size_t size, pg__ids *ids) {
  int status;
  size_t waiting = 0;
  PG_TRY(reserve_scratch(t, size));
  PG_TRY(reserve(t, ids, (int64_t)size));
  pg__symbol *s = t->symbols;
  for (size_t i = 0; i < size; i++)
    s[i] = (pg__symbol){t->byte_ids[(uint8_t)piece[i]], (int64_t)i - 1, (int64_t)i + 1};
  s[size - 1].behind = -1;
  for (size_t i = 0; i + 1 < size; i++) {
    const pg__merge_slot *m = find_pair(t, s[i].id, s[i + 1].id);
    if (m) t->heap[waiting++] = (pg__candidate){m->rank, (int64_t)i};
  }
  for (size_t i = waiting / 2; i-- > 0;) heap_sift_down(t->heap, waiting, i);
  while (waiting > 0) {
    pg__candidate best = t->heap[0];
    t->heap[0] = t->heap[--waiting];
    if (waiting) heap_sift_down(t->heap, waiting, 0);
    const pg__merge_slot *m = merge_at(t, best.at);
    if (!m || m->rank != best.rank) continue; /* its symbols have been merged otherwise */
    pg__symbol *left = &s[best.at], *right = &s[left->behind];
    left->id = m->result;
    right->id = -1;
    left->behind = right->behind;
    if (left->behind >= 0) s[left->behind].before = best.at;
    if ((m = merge_at(t, best.at))) heap_push(t->heap, &waiting, (pg__candidate){m->rank, best.at});
    if (left->before >= 0 && (m = merge_at(t, left->before)))
      heap_push(t->heap, &waiting, (pg__candidate){m->rank, left->before});
  }
  for (int64_t i = 0; i >= 0; i = s[i].behind) ids->data[ids->count++] = s[i].id;
  return 0;
fail:
  return status;
}

static int encode_piece(pg_tokenizer *t, const char *piece, size_t size, pg__ids *ids) {
  int status;
  if (size > PG__CACHE_KEY) return merge_piece(t, piece, size, ids);
  PG_TRY(reserve(t, ids, PG__CACHE_KEY));
  if (size == 1) {
    ids->data[ids->count++] = t->byte_ids[(uint8_t)piece[0]];
    return 0;
  }
  size_t h = (size_t)hash_bytes(piece, size) & (CACHE_SLOTS - 1);
  for (size_t way = 0; way < 2; way++) {
    const pg__cache_slot *slot = &t->cache[h ^ way];
    if (slot->size != size || memcmp(slot->key, piece, size) != 0) continue;
    memcpy(ids->data + ids->count, slot->ids, sizeof slot->ids);
    ids->count += slot->count;
    return 0;
  }
  int64_t before = ids->count;
  PG_TRY(merge_piece(t, piece, size, ids));
  int64_t count = ids->count - before;
  if (count > PG__CACHE_IDS) return 0;
  t->cache[h ^ 1] = t->cache[h];
  pg__cache_slot *slot = &t->cache[h];
  slot->size = (uint8_t)size;
  slot->count = (uint8_t)count;
  memcpy(slot->key, piece, size);
  memcpy(slot->ids, ids->data + before, (size_t)count * sizeof *slot->ids);
  return 0;
fail:
  return status;
}

static int encode_plain(pg_tokenizer *t, const char *text, size_t size, pg__ids *ids) {
  const char *piece;
  size_t length, polled = 0;
  pg__pieces walk = pg__pieces_of(&t->pretokenizer, text, size);
  int more;
  while ((more = pg__pieces_next(&walk, &piece, &length)) > 0) {
    int status = encode_piece(t, piece, length, ids);
    if (status < 0) return status;
    if (walk.at - polled >= (1 << 20)) {
      polled = walk.at;
      if (pg_context_cancelled(t->context))
        return pg_fail(t->context, PG_ECANCELED, "encoding was cancelled");
    }
  }
  return more;
}

/* Added tokens first: the leftmost, at one place the longest; what lies between is plain text. */
int pg__tokenizer_append(pg_tokenizer *t, const char *text, size_t size, bool allow_special,
                         pg__ids *ids) {
  int status = 0;
  size_t active = 0, at = 0;
  size_t *found = NULL; /* the next occurrence of each active token; size: none */
  if (!t->cache && !(t->cache = calloc(CACHE_SLOTS, sizeof *t->cache))) return out_of_memory(t);
  for (size_t i = 0; i < t->added_count; i++) active += allow_special || !t->added[i].special;
  if (active == 0) return encode_plain(t, text, size, ids);
  found = calloc(t->added_count, sizeof *found);
  if (!found) return out_of_memory(t);
  for (bool first = true; at < size; first = false) {
    size_t best = size, best_length = 0;
    int32_t best_id = -1;
    for (size_t i = 0; i < t->added_count; i++) {
      if (t->added[i].special && !allow_special) continue;
      size_t length;
      const char *bytes = pg_tokenizer_bytes(t, t->added[i].id, &length);
      if (first || found[i] < at) {
        const char *hit = memmem(text + at, size - at, bytes, length);
        found[i] = hit ? (size_t)(hit - text) : size;
      }
      if (found[i] < best || (found[i] == best && best < size && length > best_length)) {
        best = found[i];
        best_length = length;
        best_id = t->added[i].id;
      }
    }
    PG_TRY(encode_plain(t, text + at, best - at, ids));
    at = best;
    if (best_id >= 0) {
      PG_TRY(reserve(t, ids, 1));
      ids->data[ids->count++] = best_id;
      at += best_length;
    }
  }
fail:
  free(found);
  return status;
}

int pg_tokenizer_encode(const pg_tokenizer *t, const char *text, size_t size, bool allow_special,
                        int32_t **ids, int64_t *count) {
  pg__ids list = {0};
  *ids = NULL;
  *count = 0;
  /* Encoding changes only the scratch and the cache of t, which belong to the context's thread. */
  pg_tokenizer *own = (pg_tokenizer *)t;
  int status = reserve(own, &list, (int64_t)(size / 3) + 1);
  if (status == 0) status = pg__tokenizer_append(own, text, size, allow_special, &list);
  if (status < 0) {
    free(list.data);
    return status;
  }
  *ids = list.data;
  *count = list.count;
  return 0;
}
