/* Tokenizer files: Hugging Face's tokenizer.json, and a vocabulary (vocab.json, encoder.json) with
 * its merges (merges.txt, vocab.bpe).
 *
 * Accepted is byte-level BPE whose pre-tokeniser is ByteLevel (without a prefix space: with one,
 * bytes would not round-trip), or GPT-2's pattern as a Split followed by ByteLevel. Truncation,
 * padding, post-processor and decoder do not change the ids of a text and are not looked at. Ids
 * must be 0 … n - 1 without gaps, so memory is bounded by the size of the file. */
#include "files.h"
#include "internal.h"
#include "json.h"
#include "tokenizer_internal.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FILE_LIMIT ((int64_t)256 << 20)
#define OPTIMISED_PATTERN                                                                          \
  "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* A tokenizer being read. `names` borrows from the JSON values, which outlive it. */
typedef struct reading {
  pg_context *context;
  const char *what; /* for messages */
  const json_t *vocab;
  int64_t limit, count; /* ids are below limit; how many are known */
  const char **names;
  bool *literal; /* the name is the text itself, not GPT-2's alphabet */
  pg__added *added;
  size_t added_count;
  pg__merge *merges;
  int64_t merge_count;
  char *bytes;
  size_t *starts;
  char *scratch; /* room for the two parts of a merge */
  size_t scratch_size;
} reading;

#define BAD(r, ...) pg_fail((r)->context, PG_EFORMAT, __VA_ARGS__)

static int no_memory(const reading *r) {
  return pg_fail(r->context, PG_ENOMEM, "no memory to read %s", r->what);
}

static const char *kind_of(const json_t *value) {
  if (!value) return "nothing";
  switch (json_typeof(value)) {
  case JSON_OBJECT: return "an object";
  case JSON_ARRAY: return "an array";
  case JSON_STRING: return "a string";
  case JSON_INTEGER:
  case JSON_REAL: return "a number";
  case JSON_NULL: return "null";
  default: return "a truth value";
  }
}

/* ---- vocabulary ------------------------------------------------------------------------------ */
static int claim_id(reading *r, const char *name, json_int_t id) {
  if (id < 0 || id >= r->limit)
    return BAD(r, "%s: token \"%.40s\" has id %lld; %lld tokens need ids 0 to %lld", r->what, name,
               (long long)id, (long long)r->limit, (long long)r->limit - 1);
  if (r->names[id])
    return BAD(r, "%s: tokens \"%.40s\" and \"%.40s\" both have id %lld", r->what, r->names[id],
               name, (long long)id);
  r->names[id] = name;
  r->count++;
  return 0;
}

static int read_vocab(reading *r, json_t *vocab, size_t added) {
  int status;
  const char *name;
  json_t *id;
  if (!json_is_object(vocab))
    return BAD(r, "%s: the vocabulary is %s, expected an object", r->what, kind_of(vocab));
  r->vocab = vocab;
  r->limit = (int64_t)(json_object_size(vocab) + added);
  if (r->limit > INT32_MAX) return BAD(r, "%s: too many tokens", r->what);
  r->names = calloc((size_t)r->limit + 1, sizeof *r->names);
  r->literal = calloc((size_t)r->limit + 1, sizeof *r->literal);
  r->added = calloc(added + 1, sizeof *r->added); /* one more: see read_pair */
  if (!r->names || !r->literal || !r->added) return no_memory(r);
  json_object_foreach(vocab, name, id) {
    if (!json_is_integer(id))
      return BAD(r, "%s: the id of token \"%.40s\" is %s, expected an integer", r->what, name,
                 kind_of(id));
    PG_TRY(claim_id(r, name, json_integer_value(id)));
  }
  return 0;
fail:
  return status;
}

static int read_added(reading *r, const json_t *list) {
  int status;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *item = json_array_get(list, i);
    const char *name = json_string_value(json_object_get(item, "content"));
    const json_t *id = json_object_get(item, "id");
    if (!name || !*name || !json_is_integer(id))
      return BAD(r, "%s: added token %zu needs a string \"content\" and an integer \"id\"", r->what,
                 i);
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    for (size_t k = 0; k < PG_COUNT(flags); k++)
      if (json_is_true(json_object_get(item, flags[k])))
        return pg_fail(r->context, PG_EUNSUPPORTED, "%s: added token \"%.40s\" with %s = true",
                       r->what, name, flags[k]);
    json_int_t at = json_integer_value(id);
    const json_t *known = json_object_get(r->vocab, name);
    if (!known)
      PG_TRY(claim_id(r, name, at));
    else if (json_integer_value(known) != at)
      return BAD(r, "%s: added token \"%.40s\" has id %lld, but %lld in the vocabulary", r->what,
                 name, (long long)at, (long long)json_integer_value(known));
    if (r->literal[at]) return BAD(r, "%s: token \"%.40s\" is added twice", r->what, name);
    r->literal[at] = true;
    const json_t *special = json_object_get(item, "special");
    r->added[r->added_count++] = (pg__added){(int32_t)at, !special || json_is_true(special)};
  }
  return 0;
fail:
  return status;
}

/* Names to bytes, once all ids are known. */
static int decode_names(reading *r) {
  int64_t n = r->count, size = 0, at = 0;
  for (int64_t id = 0; id < n; id++) {
    if (!r->names[id])
      return BAD(r, "%s: no token has id %lld; %lld tokens need ids 0 to %lld", r->what,
                 (long long)id, (long long)n, (long long)n - 1);
    size += (int64_t)strlen(r->names[id]);
  }
  r->bytes = malloc((size_t)size + 1);
  r->starts = malloc((size_t)(n + 1) * sizeof *r->starts);
  if (!r->bytes || !r->starts) return no_memory(r);
  for (int64_t id = 0; id < n; id++) {
    const unsigned char *s = (const unsigned char *)r->names[id];
    r->starts[id] = (size_t)at;
    if (r->literal[id]) {
      for (; *s; s++) r->bytes[at++] = (char)*s;
      continue;
    }
    while (*s) { /* the alphabet ends at U+0143: one or two bytes of UTF-8 each */
      uint32_t point = *s < 0x80               ? s[0]
                       : (s[0] & 0xe0) == 0xc0 ? (s[0] & 0x1fu) << 6 | (s[1] & 0x3fu)
                                               : 0;
      int byte = pg__byte_of(point);
      if (byte < 0)
        return BAD(r, "%s: token %lld \"%.40s\" is not written in GPT-2's alphabet of bytes",
                   r->what, (long long)id, r->names[id]);
      r->bytes[at++] = (char)byte;
      s += *s < 0x80 ? 1 : 2;
    }
  }
  r->starts[n] = (size_t)at;
  return 0;
}

/* ---- merges ---------------------------------------------------------------------------------- */
static int64_t id_of(const reading *r, const char *name) {
  const json_t *id = json_object_get(r->vocab, name);
  return id ? (int64_t)json_integer_value(id) : -1;
}

/* The merge of a (size m) and b (size n), which need not end in NUL. */
static int add_merge(reading *r, const char *a, size_t m, const char *b, size_t n) {
  if (r->scratch_size < m + n + 1) {
    free(r->scratch);
    r->scratch_size = 2 * (m + n + 1);
    r->scratch = malloc(r->scratch_size);
    if (!r->scratch) {
      r->scratch_size = 0;
      return no_memory(r);
    }
  }
  int64_t ids[3];
  const struct {
    const char *first, *second;
    size_t first_size, second_size;
  } parts[3] = {{a, b, m, 0}, {b, a, n, 0}, {a, b, m, n}};
  for (int k = 0; k < 3; k++) {
    memcpy(r->scratch, parts[k].first, parts[k].first_size);
    memcpy(r->scratch + parts[k].first_size, parts[k].second, parts[k].second_size);
    r->scratch[parts[k].first_size + parts[k].second_size] = 0;
    ids[k] = id_of(r, r->scratch);
    if (ids[k] < 0)
      return BAD(r, "%s: merge %lld: \"%.40s\" is not in the vocabulary", r->what,
                 (long long)r->merge_count, r->scratch);
  }
  r->merges[r->merge_count++] = (pg__merge){(int32_t)ids[0], (int32_t)ids[1], (int32_t)ids[2]};
  return 0;
}

/* "a b", with exactly one space: the alphabet has none. */
static int add_merge_line(reading *r, const char *line, size_t size) {
  const char *space = memchr(line, ' ', size);
  if (!space || space == line || space == line + size - 1 ||
      memchr(space + 1, ' ', size - (size_t)(space + 1 - line)))
    return BAD(r, "%s: merge %lld is \"%.*s\", expected two tokens and a space between", r->what,
               (long long)r->merge_count, (int)(size < 40 ? size : 40), line);
  size_t m = (size_t)(space - line);
  return add_merge(r, line, m, space + 1, size - m - 1);
}

static int read_merges(reading *r, const json_t *list) {
  int status;
  if (!json_is_array(list))
    return BAD(r, "%s: the merges are %s, expected an array", r->what, kind_of(list));
  if (json_array_size(list) > INT32_MAX) return BAD(r, "%s: too many merges", r->what);
  r->merges = malloc((json_array_size(list) + 1) * sizeof *r->merges);
  if (!r->merges) return no_memory(r);
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *item = json_array_get(list, i);
    const json_t *a = json_array_get(item, 0), *b = json_array_get(item, 1);
    if (json_is_string(item))
      PG_TRY(add_merge_line(r, json_string_value(item), json_string_length(item)));
    else if (json_array_size(item) == 2 && json_is_string(a) && json_is_string(b))
      PG_TRY(add_merge(r, json_string_value(a), json_string_length(a), json_string_value(b),
                       json_string_length(b)));
    else
      return BAD(r, "%s: merge %zu is %s, expected a string or a pair of strings", r->what, i,
                 kind_of(item));
  }
  return 0;
fail:
  return status;
}

static int read_merge_lines(reading *r, const char *text, size_t size) {
  int status;
  size_t lines = 1;
  for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
  if (lines > INT32_MAX) return BAD(r, "%s: too many merges", r->what);
  r->merges = malloc(lines * sizeof *r->merges);
  if (!r->merges) return no_memory(r);
  static const char version[] = "#version";
  for (const char *line = text, *end = text + size; line < end;) {
    const char *stop = memchr(line, '\n', (size_t)(end - line));
    if (!stop) stop = end;
    size_t length = (size_t)(stop - line);
    if (length && line[length - 1] == '\r') length--;
    bool comment = line == text && length >= sizeof version - 1 &&
                   memcmp(line, version, sizeof version - 1) == 0;
    if (length && !comment) PG_TRY(add_merge_line(r, line, length));
    line = stop + 1;
  }
  return 0;
fail:
  return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */
/* Hands the parts over to a tokenizer, or frees them. */
static int finish(reading *r, int status, pg_tokenizer **out) {
  free(r->names);
  free(r->literal);
  free(r->scratch);
  if (status == 0)
    return pg__tokenizer_build(r->context, r->what, r->count, r->bytes, r->starts, r->merges,
                               r->merge_count, r->added, r->added_count, out);
  free(r->bytes);
  free(r->starts);
  free(r->merges);
  free(r->added);
  return status;
}

static bool is_type(const json_t *object, const char *type) {
  const char *is = json_string_value(json_object_get(object, "type"));
  return is && strcmp(is, type) == 0;
}

static bool is_absent(const json_t *value) {
  return !value || json_is_null(value);
}

/* GPT-2's pattern as an isolating split. */
static bool is_gpt2_split(const json_t *split) {
  const char *pattern =
      json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
  const char *behavior = json_string_value(json_object_get(split, "behavior"));
  bool invert = json_is_true(json_object_get(split, "invert"));
  if (!is_type(split, "Split") || !pattern || !behavior) return false;
  if (strcmp(pattern, PG_GPT2_PATTERN) != 0 && strcmp(pattern, OPTIMISED_PATTERN) != 0)
    return false;
  return (strcmp(behavior, "Isolated") == 0 && !invert) ||
         (strcmp(behavior, "Removed") == 0 && invert);
}

static int check_pretokenizer(const reading *r, const json_t *p) {
  const json_t *level = p;
  bool split = false;
  if (is_type(p, "Sequence")) {
    const json_t *list = json_object_get(p, "pretokenizers");
    level = NULL;
    if (json_array_size(list) == 2 && is_gpt2_split(json_array_get(list, 0))) {
      split = true;
      level = json_array_get(list, 1);
    }
  }
  const char *type = json_string_value(json_object_get(p, "type"));
  if (!is_type(level, "ByteLevel"))
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "%s: pre-tokeniser %.40s; supported are ByteLevel, and GPT-2's pattern as a "
                   "Split followed by ByteLevel",
                   r->what, type ? type : kind_of(p));
  if (!json_is_false(json_object_get(level, "add_prefix_space")))
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "%s: the pre-tokeniser has add_prefix_space = true, supported is false",
                   r->what);
  if (json_is_false(json_object_get(level, "use_regex")) && !split)
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "%s: the pre-tokeniser has use_regex = false and no Split with GPT-2's pattern",
                   r->what);
  return 0;
}

static int check_model(const reading *r, const json_t *model) {
  static const char *const empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  const json_t *type = json_object_get(model, "type"), *dropout = json_object_get(model, "dropout");
  if (!json_is_object(model))
    return BAD(r, "%s: \"model\" is %s, expected an object", r->what, kind_of(model));
  if (type && !is_type(model, "BPE"))
    return pg_fail(r->context, PG_EUNSUPPORTED, "%s: model %.40s, supported is BPE", r->what,
                   json_is_string(type) ? json_string_value(type) : kind_of(type));
  for (size_t i = 0; i < PG_COUNT(empty); i++) {
    const json_t *value = json_object_get(model, empty[i]);
    if (!is_absent(value) && !(json_is_string(value) && json_string_length(value) == 0))
      return pg_fail(r->context, PG_EUNSUPPORTED, "%s: a model with %s", r->what, empty[i]);
  }
  if (!is_absent(dropout) && json_number_value(dropout) != 0)
    return pg_fail(r->context, PG_EUNSUPPORTED, "%s: a model with dropout", r->what);
  if (json_is_true(json_object_get(model, "ignore_merges")))
    return pg_fail(r->context, PG_EUNSUPPORTED, "%s: a model with ignore_merges = true", r->what);
  return 0;
}

static int read_tokenizer(reading *r, const json_t *root) {
  int status;
  const json_t *model = json_object_get(root, "model");
  const json_t *added = json_object_get(root, "added_tokens");
  const json_t *normalizer = json_object_get(root, "normalizer");
  if (!model) return BAD(r, "%s is not a tokenizer.json: it has no \"model\"", r->what);
  PG_TRY(check_model(r, model));
  if (!is_absent(normalizer))
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "%s: a normalizer (%.40s), supported is none: it would change the text", r->what,
                   json_is_string(json_object_get(normalizer, "type"))
                       ? json_string_value(json_object_get(normalizer, "type"))
                       : kind_of(normalizer));
  PG_TRY(check_pretokenizer(r, json_object_get(root, "pre_tokenizer")));
  if (!is_absent(added) && !json_is_array(added))
    return BAD(r, "%s: \"added_tokens\" is %s, expected an array", r->what, kind_of(added));
  PG_TRY(read_vocab(r, json_object_get(model, "vocab"), json_array_size(added)));
  PG_TRY(read_added(r, added));
  PG_TRY(decode_names(r));
  PG_TRY(read_merges(r, json_object_get(model, "merges")));
  return 0;
fail:
  return status;
}

int pg__tokenizer_parse(pg_context *ctx, const char *what, const char *text, size_t size,
                        pg_tokenizer **out) {
  reading r = {.context = ctx, .what = what};
  json_t *root;
  *out = NULL;
  int status = pg__json_parse(ctx, text, size, what, &root);
  if (status < 0) return status;
  status = finish(&r, read_tokenizer(&r, root), out);
  json_decref(root);
  return status;
}

int pg__tokenizer_parse_pair(pg_context *ctx, const char *vocab_name, const char *vocab,
                             size_t vocab_size, const char *merges_name, const char *merges,
                             size_t merges_size, pg_tokenizer **out) {
  int status;
  reading r = {.context = ctx, .what = vocab_name};
  json_t *root;
  *out = NULL;
  PG_TRY(pg__json_parse(ctx, vocab, vocab_size, vocab_name, &root));
  status = read_vocab(&r, root, 0);
  if (status == 0) {
    /* These files do not tell which tokens are special; the end-of-text token is, by its name. */
    int64_t id = id_of(&r, PG_END_OF_TEXT);
    if (id >= 0) {
      r.literal[id] = true;
      r.added[r.added_count++] = (pg__added){(int32_t)id, true};
    }
    status = decode_names(&r);
  }
  if (status == 0) {
    r.what = merges_name;
    status = read_merge_lines(&r, merges, merges_size);
  }
  status = finish(&r, status, out);
  json_decref(root);
fail:
  return status;
}

/* ---- paths ----------------------------------------------------------------------------------- */
static char *join(const char *folder, size_t size, const char *name, const char *suffix) {
  char *path;
  return asprintf(&path, "%.*s%s%s", (int)size, folder, name, suffix) < 0 ? NULL : path;
}

static int load_single(pg_context *ctx, const char *path, pg_tokenizer **out) {
  char *text;
  size_t size;
  int status = pg_file_read(ctx, path, FILE_LIMIT, &text, &size);
  if (status < 0) return status;
  status = pg__tokenizer_parse(ctx, path, text, size, out);
  free(text);
  return status;
}

static int load_pair(pg_context *ctx, const char *vocab, const char *merges, pg_tokenizer **out) {
  int status;
  char *text[2] = {NULL, NULL};
  size_t size[2];
  PG_TRY(pg_file_read(ctx, vocab, FILE_LIMIT, &text[0], &size[0]));
  PG_TRY(pg_file_read(ctx, merges, FILE_LIMIT, &text[1], &size[1]));
  status = pg__tokenizer_parse_pair(ctx, vocab, text[0], size[0], merges, text[1], size[1], out);
fail:
  free(text[0]);
  free(text[1]);
  return status;
}

int pg_tokenizer_load(pg_context *ctx, const char *path, pg_tokenizer **out) {
  static const char *const pairs[][2] = {{"vocab.json", "merges.txt"},
                                         {"encoder.json", "vocab.bpe"}};
  struct stat info;
  char *first = NULL, *second = NULL;
  int status = 0;
  *out = NULL;
  if (stat(path, &info) < 0)
    return pg_fail(ctx, errno == ENOENT || errno == ENOTDIR ? PG_ENOENT : PG_EIO,
                   "tokenizer %s cannot be examined: %s", path, strerror(errno));
  size_t length = strlen(path);
  if (!S_ISDIR(info.st_mode)) {
    /* PREFIXvocab.json has its merges in PREFIXmerges.txt. */
    for (size_t i = 0; i < PG_COUNT(pairs); i++) {
      size_t n = strlen(pairs[i][0]);
      if (length < n || strcmp(path + length - n, pairs[i][0]) != 0) continue;
      second = join(path, length - n, pairs[i][1], "");
      if (!second) return pg_fail(ctx, PG_ENOMEM, "no memory for a path");
      status = load_pair(ctx, path, second, out);
      free(second);
      return status;
    }
    return load_single(ctx, path, out);
  }
  if (!(first = join(path, length, "/tokenizer.json", "")))
    return pg_fail(ctx, PG_ENOMEM, "no memory for a path");
  if (stat(first, &info) == 0) {
    status = load_single(ctx, first, out);
    free(first);
    return status;
  }
  free(first);
  for (size_t i = 0; i < PG_COUNT(pairs); i++) {
    first = join(path, length, "/", pairs[i][0]);
    second = join(path, length, "/", pairs[i][1]);
    bool found = first && second && stat(first, &info) == 0;
    if (!first || !second) status = pg_fail(ctx, PG_ENOMEM, "no memory for a path");
    if (found) status = load_pair(ctx, first, second, out);
    free(first);
    free(second);
    if (found || status < 0) return status;
  }
  return pg_fail(ctx, PG_ENOENT,
                 "folder %s holds no tokenizer: neither tokenizer.json, nor vocab.json with "
                 "merges.txt, nor encoder.json with vocab.bpe",
                 path);
}
