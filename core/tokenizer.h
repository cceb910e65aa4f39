/* Byte-level BPE in the manner of GPT-2: PCRE2 pre-tokenisation, ranked merges, one end-of-text
 * token. Reads Hugging Face tokenizer.json, vocab.json + merges.txt, or encoder.json + vocab.bpe;
 * trains new vocabularies; writes tokenizer.json that Hugging Face `tokenizers` loads and with
 * which it gives the same ids. */
#ifndef PG_TOKENIZER_H
#define PG_TOKENIZER_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_tokenizer pg_tokenizer;

/* `path` is a tokenizer.json, a folder that holds one of the three forms, or a vocab.json /
 * encoder.json with its merges beside it. What is not byte-level BPE with GPT-2's (or the
 * ByteLevel pre-tokeniser's) pattern is PG_EUNSUPPORTED with the reason. */
int pg_tokenizer_load(pg_context *ctx, const char *path, pg_tokenizer **out);
void pg_tokenizer_free(pg_tokenizer *t);
int pg_tokenizer_save(const pg_tokenizer *t, const char *path); /* tokenizer.json, atomically */

/* Train on `count` documents until the vocabulary (256 bytes, merges, end-of-text) has `vocab`
 * tokens, 257 <= vocab <= 65536. Deterministic: the most frequent pair first; ties go to the pair
 * with the smaller (left id, right id). Fewer merges than asked for is not an error: the
 * vocabulary is then smaller. `progress` may be NULL. */
typedef struct pg_text {
  const char *data;
  size_t size;
} pg_text;
int pg_tokenizer_train(pg_context *ctx, const pg_text *documents, size_t count, int64_t vocab,
                       void (*progress)(void *self, int64_t merges, int64_t total), void *self,
                       pg_tokenizer **out);

int64_t pg_tokenizer_vocab(const pg_tokenizer *t);       /* largest id + 1 */
int32_t pg_tokenizer_end_of_text(const pg_tokenizer *t); /* -1 when it has none */
/* Encode bytes (any bytes; invalid UTF-8 included). Ids into malloc'ed *ids. The literal text of
 * the end-of-text marker is encoded as ordinary text unless allow_special. */
int pg_tokenizer_encode(const pg_tokenizer *t, const char *text, size_t size, bool allow_special,
                        int32_t **ids, int64_t *count);
/* The bytes of one token (not NUL-terminated, owned by t); NULL for an id outside. */
const char *pg_tokenizer_bytes(const pg_tokenizer *t, int32_t id, size_t *size);
/* The id whose bytes are exactly these; -1 when none. */
int32_t pg_tokenizer_find(const pg_tokenizer *t, const char *bytes, size_t size);

/* ---- preparing a dataset --------------------------------------------------------------- */
typedef struct pg_prepare_options {
  /* Regular files: NAME.jsonl has a document in `field` of each line's object, any other file is
   * one. An end-of-text token comes between documents. */
  const char *const *texts;
  size_t text_count;
  const char *field;     /* NULL: "text" */
  const char *out;       /* folder, created; an existing one must be empty (PG_EEXIST) */
  const char *tokenizer; /* NULL: train one */
  int64_t vocab;         /* for training */
  double val_fraction;   /* of the tokens, from the end; at least 2 tokens on each side */
  int64_t shard_tokens;  /* at most so many per shard; 0: 100,000,000 */
  const char *name;      /* prefix of the shards, "text" */
  void (*progress)(void *self, const char *what, double fraction);
  void *self;
} pg_prepare_options;
typedef struct pg_prepare_report {
  int64_t vocab, train_tokens, val_tokens, train_shards, val_shards, bytes;
  char digest[65];
} pg_prepare_report;
/* Writes NAME_train_000001.bin …, NAME_val_000000.bin, tokenizer.json and last dataset.json
 * (its presence marks a complete folder). On failure nothing of it remains. */
int pg_prepare(pg_context *ctx, const pg_prepare_options *options, pg_prepare_report *report);

#ifdef __cplusplus
}
#endif
#endif
