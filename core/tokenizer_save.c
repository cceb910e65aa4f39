/* Writing tokenizer.json: byte-level BPE as Hugging Face `tokenizers` loads it, with every token in
 * the vocabulary, the added ones by their text and the others in GPT-2's alphabet. */
#include "files.h"
#include "internal.h"
#include "json.h"
#include "tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

/* The name of a token in the file, into `to` (2 bytes per byte and a NUL). */
static void write_name(const pg_tokenizer *t, int32_t id, bool literal, char *to) {
  size_t size;
  const char *bytes = pg_tokenizer_bytes(t, id, &size);
  for (size_t i = 0; i < size; i++) {
    uint32_t point = literal ? 0 : pg__code_point_of((uint8_t)bytes[i]);
    if (literal) {
      *to++ = bytes[i];
    } else if (point < 0x80) {
      *to++ = (char)point;
    } else {
      *to++ = (char)(0xc0 | point >> 6);
      *to++ = (char)(0x80 | (point & 0x3f));
    }
  }
  *to = 0;
}

static json_t *vocabulary_json(const pg_tokenizer *t, char *name) {
  json_t *vocab = json_object();
  bool *literal = calloc((size_t)t->vocab, sizeof *literal);
  bool good = vocab && literal;
  for (size_t i = 0; good && i < t->added_count; i++) literal[t->added[i].id] = true;
  for (int32_t id = 0; good && id < t->vocab; id++) {
    write_name(t, id, literal[id], name);
    good = json_object_set_new(vocab, name, json_integer(id)) == 0;
  }
  free(literal);
  if (good) return vocab;
  json_decref(vocab);
  return NULL;
}

static json_t *merges_json(const pg_tokenizer *t, char *name) {
  json_t *merges = json_array();
  bool good = merges != NULL;
  for (int64_t i = 0; good && i < t->merge_count; i++) {
    write_name(t, t->merges[i].left, false, name);
    size_t length = strlen(name);
    name[length++] = ' ';
    write_name(t, t->merges[i].right, false, name + length);
    good = json_array_append_new(merges, json_string(name)) == 0;
  }
  if (good) return merges;
  json_decref(merges);
  return NULL;
}

static json_t *added_json(const pg_tokenizer *t, char *name) {
  json_t *list = json_array();
  for (size_t i = 0; list && i < t->added_count; i++) {
    write_name(t, t->added[i].id, true, name);
    json_t *item = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (int)t->added[i].id,
                             "content", name, "single_word", 0, "lstrip", 0, "rstrip", 0,
                             "normalized", 0, "special", (int)t->added[i].special);
    if (json_array_append_new(list, item) < 0) {
      json_decref(list);
      list = NULL;
    }
  }
  return list;
}

int pg_tokenizer_save(const pg_tokenizer *t, const char *path) {
  int status;
  size_t longest = 0;
  json_t *vocab = NULL, *merges = NULL, *added = NULL, *root = NULL;
  char *text = NULL;
  for (int64_t id = 0; id < t->vocab; id++)
    longest =
        longest > t->starts[id + 1] - t->starts[id] ? longest : t->starts[id + 1] - t->starts[id];
  char *name = malloc(4 * longest + 2);
  if (name) {
    vocab = vocabulary_json(t, name);
    merges = merges_json(t, name);
    added = added_json(t, name);
  }
  if (vocab && merges && added)
    root = json_pack("{s:s, s:n, s:n, s:O, s:n, s:{s:s, s:b, s:b, s:b}, s:n,"
                     " s:{s:s, s:b, s:b, s:b},"
                     " s:{s:s, s:n, s:n, s:s, s:s, s:b, s:b, s:b, s:O, s:O}}",
                     "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer",
                     "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                     "use_regex", 1, "post_processor", "decoder", "type", "ByteLevel",
                     "add_prefix_space", 1, "trim_offsets", 1, "use_regex", 1, "model", "type",
                     "BPE", "dropout", "unk_token", "continuing_subword_prefix", "",
                     "end_of_word_suffix", "", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges",
                     0, "vocab", vocab, "merges", merges);
  if (root) text = pg__json_print(root, 2);
  status = text ? pg_file_write_atomic(t->context, path, text, strlen(text))
                : pg_fail(t->context, PG_ENOMEM, "no memory to write %s", path);
  free(text);
  free(name);
  json_decref(root);
  json_decref(vocab);
  json_decref(merges);
  json_decref(added);
  return status;
}
