/* Inside the tokenizer: pre-tokenisation, the vocabulary's tables, and appending encoding. */
#ifndef PG_TOKENIZER_INTERNAL_H
#define PG_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"
#include <pcre2.h>

#define PG_END_OF_TEXT "<|endoftext|>"
#define PG_GPT2_PATTERN                                                                            \
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* ---- pretokenize.c ------------------------------------------------------------------------- */
typedef struct pg__pretokenizer {
  pg_context *context;
  pcre2_code *code;
  pcre2_match_data *match;
  bool jit;
} pg__pretokenizer;

int pg__pretokenizer_init(pg_context *ctx, pg__pretokenizer *p);
void pg__pretokenizer_free(pg__pretokenizer *p);

/* A walk over the pieces of a text, in order; together they are the text. */
typedef struct pg__pieces {
  pg__pretokenizer *pretokenizer;
  const char *text;
  size_t size, at;
  size_t run_end; /* end of the valid UTF-8 around `at` */
} pg__pieces;
static inline pg__pieces pg__pieces_of(pg__pretokenizer *p, const char *text, size_t size) {
  return (pg__pieces){.pretokenizer = p, .text = text, .size = size};
}
/* 1 and the next piece, 0 at the end, negative on failure. */
int pg__pieces_next(pg__pieces *walk, const char **piece, size_t *size);

/* Length of the longest prefix that is well-formed UTF-8 (no surrogates, no overlong forms). */
size_t pg__utf8_prefix(const char *text, size_t size);

/* The largest cut <= size at which the text can be divided without changing its pieces: between
 * something that is not white space and an ASCII space or line feed. 0 when there is none. */
size_t pg__safe_cut(const char *text, size_t size);

/* ---- tokenizer.c ----------------------------------------------------------------------------- */
typedef struct pg__merge {
  int32_t left, right, result;
} pg__merge;

typedef struct pg__added { /* a token that is looked for in the text before anything else */
  int32_t id;
  bool special; /* only with allow_special */
} pg__added;

/* Remembers the ids of short pieces. Two-way: slots h and h ^ 1; a line of cache each. */
#define PG__CACHE_KEY 30
#define PG__CACHE_IDS 8
typedef struct pg__cache_slot {
  uint8_t size, count; /* size 0: empty */
  char key[PG__CACHE_KEY];
  int32_t ids[PG__CACHE_IDS];
} pg__cache_slot;

typedef struct pg__merge_slot {
  int32_t left, right; /* left -1: empty */
  int32_t rank, result;
} pg__merge_slot;

struct pg_tokenizer {
  pg_context *context;
  pg__pretokenizer pretokenizer;
  /* Vocabulary: token i is bytes[starts[i] .. starts[i + 1]). */
  int64_t vocab;
  char *bytes;
  size_t *starts;
  int32_t *table; /* open addressing over bytes, -1: empty */
  size_t table_mask;
  int32_t byte_ids[256];
  int32_t end_of_text;
  /* Merges in rank order, and pair -> (rank, result). */
  pg__merge *merges;
  int64_t merge_count;
  pg__merge_slot *pairs;
  size_t pair_mask;
  pg__added *added;
  size_t added_count;
  /* Scratch of encoding. */
  pg__cache_slot *cache;
  struct pg__symbol *symbols;
  struct pg__candidate *heap;
  size_t symbol_capacity, heap_capacity;
};

/* Ids of an encoding in progress. */
typedef struct pg__ids {
  int32_t *data;
  int64_t count, capacity;
} pg__ids;
int pg__tokenizer_append(pg_tokenizer *t, const char *text, size_t size, bool allow_special,
                         pg__ids *ids);

/* Build a tokenizer from its parts, which it takes over in any case: `bytes` and `starts`
 * ([vocab + 1]), `merges` (ids checked by the caller to be in range), `added`. Checks that every
 * byte has a token and that merges are distinct and give what they say. `what` names the source
 * in messages. */
int pg__tokenizer_build(pg_context *ctx, const char *what, int64_t vocab, char *bytes,
                        size_t *starts, pg__merge *merges, int64_t merge_count, pg__added *added,
                        size_t added_count, pg_tokenizer **out);

/* GPT-2's alphabet: byte <-> printable code point. pg__byte_of gives -1 for other code points. */
uint32_t pg__code_point_of(uint8_t byte);
int pg__byte_of(uint32_t code_point);
/* Bytes in the order in which their tokens are numbered: by code point. */
void pg__byte_order(uint8_t order[256]);

/* ---- tokenizer_files.c, tokenizer_save.c ------------------------------------------------------
 */
/* As pg_tokenizer_load, from the text of a tokenizer.json. */
int pg__tokenizer_parse(pg_context *ctx, const char *what, const char *text, size_t size,
                        pg_tokenizer **out);
/* From the texts of a vocabulary (JSON) and its merges. */
int pg__tokenizer_parse_pair(pg_context *ctx, const char *vocab_name, const char *vocab,
                             size_t vocab_size, const char *merges_name, const char *merges,
                             size_t merges_size, pg_tokenizer **out);

/* ---- tokenizer_train.c ----------------------------------------------------------------------- */
/* Training that is fed piece by piece: texts are counted, not kept. */
typedef struct pg__trainer pg__trainer;
int pg__trainer_new(pg_context *ctx, pg__trainer **out);
void pg__trainer_free(pg__trainer *trainer);
/* Count the pieces of a text; a document may come in parts that end at pg__safe_cut. */
int pg__trainer_add(pg__trainer *trainer, const char *text, size_t size);
int pg__trainer_finish(pg__trainer *trainer, int64_t vocab,
                       void (*progress)(void *self, int64_t merges, int64_t total), void *self,
                       pg_tokenizer **out);

#endif
