/* Training byte-level BPE: merge the most frequent adjacent pair of symbols, again and again.
 *
 * Texts are reduced to their distinct pieces with counts. The symbols of all pieces form linked
 * lists, every pair knows the places where it occurs, and a heap holds the pairs by count, so a
 * merge costs what it changes, however long the pieces are. Invariants between merges: a pair's
 * count is the number of its adjacent occurrences, weighted by the counts of their pieces (both of
 * "aaa" for the pair aa); its places include all occurrences (and stale ones, recognised by their
 * symbols); the heap holds an entry with at least the pair's count, ties by (left id, right id). */
#include "internal.h"
#include "tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

/* ---- growing arrays -------------------------------------------------------------------------- */
static int grow(pg_context *ctx, void *array, size_t count, size_t *capacity, size_t size) {
  if (count < *capacity) return 0;
  size_t larger = *capacity + *capacity / 2 + 1024;
  larger = larger > count ? larger : count + 1;
  void *memory = realloc(*(void **)array, larger * size);
  if (!memory) return pg_fail(ctx, PG_ENOMEM, "no memory to train a tokenizer");
  *(void **)array = memory;
  *capacity = larger;
  return 0;
}

static uint64_t hash_bytes(const char *bytes, size_t size) {
  uint64_t h = 0xcbf29ce484222325u, word;
  for (; size >= 8; bytes += 8, size -= 8) {
    memcpy(&word, bytes, 8);
    h = (h ^ word) * 0x9fb21c651e98df25u;
    h ^= h >> 32;
  }
  word = 0;
  memcpy(&word, bytes, size);
  h = (h ^ word ^ (uint64_t)size << 56) * 0x9fb21c651e98df25u;
  return h ^ h >> 32;
}

/* ---- counting pieces ------------------------------------------------------------------------- */
typedef struct word {
  size_t start, size;
  int64_t count;
  uint64_t hash;
} word;

struct pg__trainer {
  pg_context *context;
  pg__pretokenizer pretokenizer;
  char *bytes; /* of all words */
  size_t size, capacity;
  word *words;
  size_t word_count, word_capacity;
  uint32_t *table; /* open addressing, NONE: empty */
  size_t table_size;
};

int pg__trainer_new(pg_context *ctx, pg__trainer **out) {
  *out = NULL;
  pg__trainer *t = calloc(1, sizeof *t);
  if (!t) return pg_fail(ctx, PG_ENOMEM, "no memory to train a tokenizer");
  t->context = ctx;
  int status = pg__pretokenizer_init(ctx, &t->pretokenizer);
  if (status < 0) {
    free(t);
    return status;
  }
  *out = t;
  return 0;
}

void pg__trainer_free(pg__trainer *t) {
  if (!t) return;
  pg__pretokenizer_free(&t->pretokenizer);
  free(t->bytes);
  free(t->words);
  free(t->table);
  free(t);
}

static int enlarge_table(pg__trainer *t) {
  size_t size = t->table_size ? 2 * t->table_size : 1 << 14;
  uint32_t *table = malloc(size * sizeof *table);
  if (!table) return pg_fail(t->context, PG_ENOMEM, "no memory to train a tokenizer");
  memset(table, 0xff, size * sizeof *table);
  for (size_t i = 0; i < t->word_count; i++) {
    size_t h = t->words[i].hash & (size - 1);
    while (table[h] != NONE) h = (h + 1) & (size - 1);
    table[h] = (uint32_t)i;
  }
  free(t->table);
  t->table = table;
  t->table_size = size;
  return 0;
}

static int count_piece(pg__trainer *t, const char *piece, size_t size) {
  int status;
  if (2 * t->word_count >= t->table_size) PG_TRY(enlarge_table(t));
  uint64_t hash = hash_bytes(piece, size);
  size_t h = hash & (t->table_size - 1);
  for (; t->table[h] != NONE; h = (h + 1) & (t->table_size - 1)) {
    word *w = &t->words[t->table[h]];
    if (w->hash == hash && w->size == size && memcmp(t->bytes + w->start, piece, size) == 0) {
      w->count++;
      return 0;
    }
  }
  /* Places of pairs are counted in 32 bits, at most three for each byte. */
  if (t->size + size > NONE / 3)
    return pg_fail(t->context, PG_EUNSUPPORTED,
                   "the text has more than %u bytes of different words: train the tokenizer on a "
                   "part of it",
                   NONE / 3);
  PG_TRY(grow(t->context, &t->bytes, t->size + size, &t->capacity, 1));
  PG_TRY(grow(t->context, &t->words, t->word_count, &t->word_capacity, sizeof *t->words));
  memcpy(t->bytes + t->size, piece, size);
  t->words[t->word_count] = (word){t->size, size, 1, hash};
  t->table[h] = (uint32_t)t->word_count++;
  t->size += size;
  return 0;
fail:
  return status;
}

int pg__trainer_add(pg__trainer *t, const char *text, size_t size) {
  int status = 0, more;
  const char *piece;
  size_t length, polled = 0;
  pg__pieces walk = pg__pieces_of(&t->pretokenizer, text, size);
  while ((more = pg__pieces_next(&walk, &piece, &length)) > 0) {
    PG_TRY(count_piece(t, piece, length));
    if (walk.at - polled < (1 << 20)) continue;
    polled = walk.at;
    if (pg_context_cancelled(t->context))
      return pg_fail(t->context, PG_ECANCELED, "training the tokenizer was cancelled");
  }
  status = more;
fail:
  return status;
}

/* ---- merging --------------------------------------------------------------------------------- */
typedef struct symbol {
  int32_t id; /* -1: merged into the one before */
  uint32_t word, before, behind;
} symbol;

typedef struct place {
  uint32_t at, next;
} place;

typedef struct pair {
  int32_t left, right;
  int64_t count;
  uint32_t first, last; /* of its places */
  uint32_t round;       /* the last merge that raised its count */
  bool merged;          /* it is in the list of merges */
} pair;

typedef struct candidate {
  int64_t count;
  uint32_t pair;
} candidate;

typedef struct merging {
  pg_context *context;
  const pg__trainer *trainer;
  symbol *symbols;
  pair *pairs;
  size_t pair_count, pair_capacity;
  uint32_t *pair_table;
  size_t pair_table_size;
  place *places;
  size_t place_count, place_capacity;
  candidate *heap;
  size_t heap_count, heap_capacity;
  uint32_t *raised; /* pairs whose count the current merge raised */
  size_t raised_count, raised_capacity;
  uint32_t *sorted; /* places of a pair of equal symbols */
  size_t sorted_capacity;
  uint32_t round;
  /* the vocabulary as it grows */
  char *bytes;
  size_t size, capacity;
  size_t *starts;
  int64_t vocab;
  int32_t *token_table;
  size_t token_table_size;
  pg__merge *merges;
  size_t merge_count, merge_capacity;
} merging;

static size_t hash_pair(int32_t left, int32_t right) {
  uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
  return (size_t)(h ^ h >> 32);
}

/* Index of the pair, made if it is new. */
static int find_pair(merging *m, int32_t left, int32_t right, uint32_t *index) {
  int status;
  if (2 * m->pair_count >= m->pair_table_size) {
    size_t size = m->pair_table_size ? 2 * m->pair_table_size : 1 << 14;
    uint32_t *table = malloc(size * sizeof *table);
    if (!table) return pg_fail(m->context, PG_ENOMEM, "no memory to train a tokenizer");
    memset(table, 0xff, size * sizeof *table);
    for (size_t i = 0; i < m->pair_count; i++) {
      size_t h = hash_pair(m->pairs[i].left, m->pairs[i].right) & (size - 1);
      while (table[h] != NONE) h = (h + 1) & (size - 1);
      table[h] = (uint32_t)i;
    }
    free(m->pair_table);
    m->pair_table = table;
    m->pair_table_size = size;
  }
  size_t mask = m->pair_table_size - 1, h = hash_pair(left, right) & mask;
  for (; m->pair_table[h] != NONE; h = (h + 1) & mask) {
    const pair *p = &m->pairs[m->pair_table[h]];
    if (p->left == left && p->right == right) {
      *index = m->pair_table[h];
      return 0;
    }
  }
  PG_TRY(grow(m->context, &m->pairs, m->pair_count, &m->pair_capacity, sizeof *m->pairs));
  *index = m->pair_table[h] = (uint32_t)m->pair_count;
  m->pairs[m->pair_count++] = (pair){.left = left, .right = right, .first = NONE, .last = NONE};
  return 0;
fail:
  return status;
}

static int lower(merging *m, int32_t left, int32_t right, int64_t weight) {
  uint32_t p;
  int status = find_pair(m, left, right, &p);
  if (status == 0) m->pairs[p].count -= weight;
  return status;
}

static int raise(merging *m, int32_t left, int32_t right, int64_t weight, uint32_t at) {
  int status;
  uint32_t index;
  PG_TRY(find_pair(m, left, right, &index));
  PG_TRY(grow(m->context, &m->places, m->place_count, &m->place_capacity, sizeof *m->places));
  pair *p = &m->pairs[index];
  uint32_t node = (uint32_t)m->place_count++;
  m->places[node] = (place){at, NONE};
  if (p->last == NONE)
    p->first = node;
  else
    m->places[p->last].next = node;
  p->last = node;
  p->count += weight;
  if (p->round == m->round) return 0;
  p->round = m->round;
  PG_TRY(grow(m->context, &m->raised, m->raised_count, &m->raised_capacity, sizeof *m->raised));
  m->raised[m->raised_count++] = index;
  return 0;
fail:
  return status;
}

static bool goes_before(const merging *m, candidate a, candidate b) {
  if (a.count != b.count) return a.count > b.count;
  const pair *p = &m->pairs[a.pair], *q = &m->pairs[b.pair];
  return p->left != q->left ? p->left < q->left : p->right < q->right;
}

static void sift_down(merging *m, candidate moving) {
  size_t i = 0;
  for (size_t child; (child = 2 * i + 1) < m->heap_count; i = child) {
    if (child + 1 < m->heap_count && goes_before(m, m->heap[child + 1], m->heap[child])) child++;
    if (!goes_before(m, m->heap[child], moving)) break;
    m->heap[i] = m->heap[child];
  }
  m->heap[i] = moving;
}

static int push(merging *m, candidate c) {
  int status;
  PG_TRY(grow(m->context, &m->heap, m->heap_count, &m->heap_capacity, sizeof *m->heap));
  size_t i = m->heap_count++;
  for (; i > 0 && goes_before(m, c, m->heap[(i - 1) / 2]); i = (i - 1) / 2)
    m->heap[i] = m->heap[(i - 1) / 2];
  m->heap[i] = c;
  return 0;
fail:
  return status;
}

static int push_raised(merging *m) {
  for (size_t i = 0; i < m->raised_count; i++) {
    uint32_t p = m->raised[i];
    int status = push(m, (candidate){m->pairs[p].count, p});
    if (status < 0) return status;
  }
  m->raised_count = 0;
  return 0;
}

/* The pair with the largest count; false when no pair occurs any more. */
static bool take_best(merging *m, uint32_t *best) {
  while (m->heap_count > 0) {
    candidate top = m->heap[0];
    int64_t count = m->pairs[top.pair].count;
    if (top.count != count && count > 0) {
      sift_down(m, (candidate){count, top.pair}); /* it has lost occurrences since */
      continue;
    }
    candidate last = m->heap[--m->heap_count];
    if (m->heap_count > 0) sift_down(m, last);
    if (count <= 0) continue;
    *best = top.pair;
    return true;
  }
  return false;
}

static int merge_at(merging *m, uint32_t at, int32_t left, int32_t right, int32_t result) {
  int status;
  symbol *s = m->symbols;
  uint32_t second = s[at].behind;
  if (s[at].id != left || second == NONE || s[second].id != right) return 0; /* stale */
  int64_t weight = m->trainer->words[s[at].word].count;
  uint32_t before = s[at].before, behind = s[second].behind;
  if (before != NONE) PG_TRY(lower(m, s[before].id, left, weight));
  if (behind != NONE) PG_TRY(lower(m, right, s[behind].id, weight));
  s[at].id = result;
  s[at].behind = behind;
  s[second].id = -1;
  if (behind != NONE) s[behind].before = at;
  if (before != NONE) PG_TRY(raise(m, s[before].id, result, weight, before));
  if (behind != NONE) PG_TRY(raise(m, result, s[behind].id, weight, at));
  return 0;
fail:
  return status;
}

static int compare_places(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

static int merge_everywhere(merging *m, uint32_t index, int32_t result) {
  int status;
  int32_t left = m->pairs[index].left, right = m->pairs[index].right;
  m->round++;
  if (left != right) { /* occurrences cannot overlap: any order will do */
    for (uint32_t i = m->pairs[index].first; i != NONE; i = m->places[i].next)
      PG_TRY(merge_at(m, m->places[i].at, left, right, result));
  } else {
    size_t count = 0;
    for (uint32_t i = m->pairs[index].first; i != NONE; i = m->places[i].next) {
      PG_TRY(grow(m->context, &m->sorted, count, &m->sorted_capacity, sizeof *m->sorted));
      m->sorted[count++] = m->places[i].at;
    }
    if (count) qsort(m->sorted, count, sizeof *m->sorted, compare_places);
    for (size_t i = 0; i < count; i++) PG_TRY(merge_at(m, m->sorted[i], left, right, result));
  }
  m->pairs[index].count = 0;
  m->pairs[index].first = m->pairs[index].last = NONE;
  PG_TRY(push_raised(m));
  return 0;
fail:
  return status;
}

/* The token with the bytes of left and right together: a pair of other tokens may have given the
 * same bytes before, and then its id serves both. */
static int find_token(merging *m, int32_t left, int32_t right, int32_t *id) {
  int status;
  size_t a = m->starts[left + 1] - m->starts[left], b = m->starts[right + 1] - m->starts[right];
  size_t mask = m->token_table_size - 1;
  PG_TRY(grow(m->context, &m->bytes, m->size + a + b, &m->capacity, 1));
  char *bytes = m->bytes + m->size;
  memcpy(bytes, m->bytes + m->starts[left], a);
  memcpy(bytes + a, m->bytes + m->starts[right], b);
  size_t h = hash_bytes(bytes, a + b) & mask;
  for (; m->token_table[h] >= 0; h = (h + 1) & mask) {
    int32_t other = m->token_table[h];
    if (m->starts[other + 1] - m->starts[other] == a + b &&
        memcmp(m->bytes + m->starts[other], bytes, a + b) == 0) {
      *id = other;
      return 0;
    }
  }
  *id = m->token_table[h] = (int32_t)m->vocab++;
  m->size += a + b;
  m->starts[m->vocab] = m->size;
  return 0;
fail:
  return status;
}

static int begin(merging *m, const pg__trainer *t, int64_t vocab) {
  int status;
  uint8_t order[256];
  int32_t byte_ids[256];
  m->token_table_size = 1024;
  while (m->token_table_size < 2 * (size_t)vocab) m->token_table_size *= 2;
  m->token_table = malloc(m->token_table_size * sizeof *m->token_table);
  m->starts = malloc((size_t)(vocab + 1) * sizeof *m->starts);
  m->symbols = malloc((t->size + 1) * sizeof *m->symbols);
  if (!m->token_table || !m->starts || !m->symbols)
    PG_TRY(pg_fail(m->context, PG_ENOMEM, "no memory to train a tokenizer"));
  memset(m->token_table, 0xff, m->token_table_size * sizeof *m->token_table);
  PG_TRY(grow(m->context, &m->bytes, 256, &m->capacity, 1));
  pg__byte_order(order);
  m->starts[0] = 0;
  for (int i = 0; i < 256; i++) {
    byte_ids[order[i]] = i;
    m->bytes[i] = (char)order[i];
    m->starts[i + 1] = (size_t)i + 1;
  }
  m->size = 256;
  m->vocab = 256;
  m->round = 1;
  for (size_t w = 0; w < t->word_count; w++) {
    uint32_t start = (uint32_t)t->words[w].start, end = start + (uint32_t)t->words[w].size;
    for (uint32_t i = start; i < end; i++)
      m->symbols[i] = (symbol){byte_ids[(uint8_t)t->bytes[i]], (uint32_t)w,
                               i > start ? i - 1 : NONE, i + 1 < end ? i + 1 : NONE};
    for (uint32_t i = start; i + 1 < end; i++)
      PG_TRY(raise(m, m->symbols[i].id, m->symbols[i + 1].id, t->words[w].count, i));
  }
  PG_TRY(push_raised(m));
  return 0;
fail:
  return status;
}

static int build(merging *m, pg_tokenizer **out) {
  int status;
  size_t length = strlen(PG_END_OF_TEXT);
  pg__added *added = malloc(sizeof *added);
  if (!added) return pg_fail(m->context, PG_ENOMEM, "no memory to train a tokenizer");
  *added = (pg__added){(int32_t)m->vocab, true};
  status = grow(m->context, &m->bytes, m->size + length, &m->capacity, 1);
  if (status < 0) {
    free(added);
    return status;
  }
  memcpy(m->bytes + m->size, PG_END_OF_TEXT, length);
  m->starts[++m->vocab] = m->size + length;
  status = pg__tokenizer_build(m->context, "the trained tokenizer", m->vocab, m->bytes, m->starts,
                               m->merges, (int64_t)m->merge_count, added, 1, out);
  m->bytes = NULL;
  m->starts = NULL;
  m->merges = NULL;
  return status;
}

int pg__trainer_finish(pg__trainer *t, int64_t vocab,
                       void (*progress)(void *self, int64_t merges, int64_t total), void *self,
                       pg_tokenizer **out) {
  int status;
  merging m = {.context = t->context, .trainer = t};
  *out = NULL;
  if (vocab < 257 || vocab > 65536)
    return pg_fail(t->context, PG_EINVAL, "a vocabulary of %lld tokens; allowed are 257 to 65536",
                   (long long)vocab);
  int64_t total = vocab - 257;
  PG_TRY(begin(&m, t, vocab));
  for (uint32_t best; m.vocab < vocab - 1 && take_best(&m, &best);) {
    int32_t left = m.pairs[best].left, right = m.pairs[best].right, result;
    PG_TRY(find_token(&m, left, right, &result));
    if (!m.pairs[best].merged) {
      PG_TRY(grow(t->context, &m.merges, m.merge_count, &m.merge_capacity, sizeof *m.merges));
      m.merges[m.merge_count++] = (pg__merge){left, right, result};
      m.pairs[best].merged = true;
    }
    PG_TRY(merge_everywhere(&m, best, result));
    if (m.merge_count % 64 != 0) continue;
    if (progress) progress(self, m.vocab - 256, total);
    if (pg_context_cancelled(t->context))
      PG_TRY(pg_fail(t->context, PG_ECANCELED, "training the tokenizer was cancelled"));
  }
  if (progress) progress(self, m.vocab - 256, m.vocab - 256);
  PG_TRY(build(&m, out));
fail:
  free(m.symbols);
  free(m.pairs);
  free(m.pair_table);
  free(m.places);
  free(m.heap);
  free(m.raised);
  free(m.sorted);
  free(m.bytes);
  free(m.starts);
  free(m.token_table);
  free(m.merges);
  return status;
}

int pg_tokenizer_train(pg_context *ctx, const pg_text *documents, size_t count, int64_t vocab,
                       void (*progress)(void *self, int64_t merges, int64_t total), void *self,
                       pg_tokenizer **out) {
  int status;
  pg__trainer *trainer = NULL;
  *out = NULL;
  PG_TRY(pg__trainer_new(ctx, &trainer));
  for (size_t i = 0; i < count; i++)
    PG_TRY(pg__trainer_add(trainer, documents[i].data, documents[i].size));
  PG_TRY(pg__trainer_finish(trainer, vocab, progress, self, out));
fail:
  pg__trainer_free(trainer);
  return status;
}
