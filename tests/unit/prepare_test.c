/* Preparing datasets: contents, split, determinism, refusals, and nothing left after a failure. */
#include "core/files.h"
#include "core/json.h"
#include "data_files.h"
#include <dirent.h>

static pg_context *ctx;
static char folder[64];

static void write_text(const char *path, const char *text, size_t size) {
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(text, 1, size, f) != size) exit(1);
  fclose(f);
}

/* Entries of a folder without "." and "..", -1 when it cannot be opened. */
static int entries(const char *path) {
  DIR *dir = opendir(path);
  if (!dir) return -1;
  int n = -2;
  while (readdir(dir)) n++;
  closedir(dir);
  return n;
}

static pg_prepare_options options(const char *const *texts, size_t count, const char *out) {
  return (pg_prepare_options){.texts = texts,
                              .text_count = count,
                              .out = out,
                              .vocab = 300,
                              .val_fraction = 0.1,
                              .shard_tokens = 100};
}

static void must_prepare(const pg_prepare_options *o, pg_prepare_report *r) {
  int status = pg_prepare(ctx, o, r);
  CHECK(status == 0, "%s", pg_context_message(ctx));
}

static void must_refuse(const pg_prepare_options *o, int code, const char *part) {
  int before = entries(folder);
  int status = pg_prepare(ctx, o, NULL);
  CHECK(status == code, "%d, want %d: %s", status, code, pg_context_message(ctx));
  CHECK(strstr(pg_context_message(ctx), part), "\"%s\" lacks \"%s\"", pg_context_message(ctx),
        part);
  CHECK(entries(folder) == before, "something was left");
}

/* All ids of the shards that match, in order. */
static int32_t *read_ids(const char *out, const char *pattern, int64_t *count, int64_t *shards,
                         int64_t *longest) {
  pg_shards *s = NULL;
  CHECK(pg_shards_open(ctx, out, pattern, &s) == 0, "%s", pg_context_message(ctx));
  if (!s) exit(1);
  int32_t *ids = malloc((size_t)s->tokens * sizeof *ids);
  uint16_t *raw = malloc((size_t)s->tokens * 2);
  *count = 0;
  *longest = 0;
  *shards = (int64_t)s->count;
  for (size_t i = 0; i < s->count; i++) {
    FILE *f = fopen(s->shards[i].path, "rb");
    size_t n = (size_t)s->shards[i].tokens;
    if (!f || fseek(f, 1024, SEEK_SET) || fread(raw, 2, n, f) != n) exit(1);
    fclose(f);
    for (size_t k = 0; k < n; k++) ids[(*count)++] = raw[k];
    if (s->shards[i].tokens > *longest) *longest = s->shards[i].tokens;
  }
  free(raw);
  pg_shards_free(s);
  return ids;
}

/* The bytes of training then validation tokens, the end-of-text token as "\0". */
static char *decode(const char *out, size_t *size, int64_t *markers) {
  pg_tokenizer *t = NULL;
  CHECK(pg_tokenizer_load(ctx, out, &t) == 0, "%s", pg_context_message(ctx));
  if (!t) exit(1);
  char *text = malloc(1 << 23);
  *size = 0;
  *markers = 0;
  for (int split = 0; split < 2; split++) {
    int64_t n, shards, longest;
    int32_t *ids = read_ids(out, split ? "*_val_*.bin" : "*_train_*.bin", &n, &shards, &longest);
    for (int64_t i = 0; i < n; i++) {
      size_t length;
      const char *bytes = pg_tokenizer_bytes(t, ids[i], &length);
      if (ids[i] == pg_tokenizer_end_of_text(t)) {
        text[(*size)++] = 0;
        ++*markers;
        continue;
      }
      memcpy(text + *size, bytes, length);
      *size += length;
    }
    free(ids);
  }
  pg_tokenizer_free(t);
  return text;
}

/* ---- contents -------------------------------------------------------------------------------- */
TEST(documents_come_back_with_markers_between) {
  data_folder(folder);
  const char *texts[3] = {data_path(folder, "a.txt"), data_path(folder, "b.txt"),
                          data_path(folder, "c.txt")};
  static const char a[] = "In the beginning <|endoftext|> was ordinary text.\n", b[] = "\xff\xfe x",
                    c[] = "the end, the end, the end\n\n";
  write_text(texts[0], a, sizeof a - 1);
  write_text(texts[1], b, sizeof b - 1);
  write_text(texts[2], c, sizeof c - 1);
  char *out = data_path(folder, "out/deep/");
  pg_prepare_options o = options(texts, 3, out);
  pg_prepare_report r;
  must_prepare(&o, &r);
  size_t size;
  int64_t markers;
  char *text = decode(out, &size, &markers), want[256];
  size_t n = 0;
  memcpy(want, a, sizeof a), n += sizeof a; /* with the NUL, which stands for the marker */
  memcpy(want + n, b, sizeof b), n += sizeof b;
  memcpy(want + n, c, sizeof c - 1), n += sizeof c - 1;
  CHECK(size == n && memcmp(text, want, n) == 0 && markers == 2);
  CHECK(r.bytes == (int64_t)(sizeof a + sizeof b + sizeof c) - 3);
  free(text);
  CHECK(entries(data_path(folder, "out")) == 1, "a temporary folder was left");
  data_folder_remove(folder);
}

static char *story(size_t size) {
  char *text = malloc(size);
  static const char *const words[] = {"the ", "king ", "of ", "Israel, ", "and\n", "son ", "42 "};
  for (size_t n = 0, k = 0; n < size; k++)
    for (const char *w = words[(k * k + k / 7) % 7]; *w && n < size; w++) text[n++] = *w;
  return text;
}

TEST(split_shards_and_description) {
  data_folder(folder);
  const char *texts[1] = {data_path(folder, "a.txt")};
  char *text = story(20000), *out = data_path(folder, "out");
  write_text(texts[0], text, 20000);
  CHECK(mkdir(out, 0777) == 0); /* an empty folder is welcome */
  for (int64_t shard = 4; shard <= 401; shard += 397 / 3) {
    pg_prepare_options o = options(texts, 1, out);
    o.shard_tokens = shard;
    o.name = "kings";
    pg_prepare_report r;
    must_prepare(&o, &r);
    int64_t train, val, train_shards, val_shards, longest, size = r.train_tokens + r.val_tokens;
    free(read_ids(out, "kings_train_*.bin", &train, &train_shards, &longest));
    CHECK(longest <= shard && train == r.train_tokens && train_shards == r.train_shards);
    free(read_ids(out, "kings_val_*.bin", &val, &val_shards, &longest));
    CHECK(longest <= shard && val == r.val_tokens && val_shards == r.val_shards);
    CHECK(r.val_tokens == (int64_t)floor((double)size * 0.1 + 0.5), "%lld of %lld",
          (long long)r.val_tokens, (long long)size);
    CHECK(train_shards == (train + shard - 1) / shard);
    CHECK(access(data_path(out, "kings_train_000001.bin"), R_OK) == 0);
    CHECK(access(data_path(out, "kings_val_000000.bin"), R_OK) == 0);
    CHECK(entries(out) == train_shards + val_shards + 2);

    char hex[65], sha[65];
    json_t *d = NULL;
    CHECK(pg_shards_digest(ctx, out, hex) == 0 && strcmp(hex, r.digest) == 0);
    CHECK(pg__json_load(ctx, data_path(out, "dataset.json"), 0, &d) == 0);
    CHECK(strcmp(json_string_value(json_object_get(d, "digest")), hex) == 0);
    CHECK(json_integer_value(json_object_get(d, "vocab")) == r.vocab);
    CHECK(json_integer_value(json_object_get(json_object_get(d, "tokens"), "train")) == train);
    CHECK(json_integer_value(json_object_get(json_object_get(d, "shards"), "val")) == val_shards);
    const json_t *source = json_array_get(json_object_get(d, "sources"), 0);
    pg_sha256(text, 20000, sha);
    CHECK(strcmp(json_string_value(json_object_get(source, "sha256")), sha) == 0);
    CHECK(strcmp(json_string_value(json_object_get(source, "name")), "a.txt") == 0);
    CHECK(json_integer_value(json_object_get(source, "bytes")) == 20000);
    char *printed = pg__json_print(d, 0);
    CHECK(!strstr(printed, "/tmp"), "a path in %s", printed);
    free(printed);
    json_decref(d);
    CHECK(pg_file_remove_tree(ctx, out) == 0);
  }
  free(text);
  data_folder_remove(folder);
}

/* Texts of several chunks give the ids of the whole, with a trained or a given tokenizer, and the
 * same bytes each time. */
TEST(chunks_and_repetitions_change_nothing) {
  const size_t size = 9500000;
  data_folder(folder);
  const char *texts[1] = {data_path(folder, "a.txt")};
  char *text = story(size), *first = data_path(folder, "out"), *second = data_path(folder, "again");
  write_text(texts[0], text, size);
  pg_prepare_options o = options(texts, 1, first);
  o.shard_tokens = 1000000;
  pg_prepare_report r, s;
  must_prepare(&o, &r);
  o.out = second;
  o.tokenizer = first;
  must_prepare(&o, &s);
  CHECK(strcmp(r.digest, s.digest) == 0);
  char command[256];
  snprintf(command, sizeof command, "diff -r -x dataset.json %s %s", first, second);
  CHECK(system(command) == 0);
  CHECK(pg_file_remove_tree(ctx, second) == 0);
  o.tokenizer = NULL;
  must_prepare(&o, &s);
  snprintf(command, sizeof command, "diff -r %s %s", first, second);
  CHECK(system(command) == 0);

  pg_tokenizer *t = NULL;
  int32_t *want, *got;
  int64_t n, train, val, shards, longest;
  CHECK(pg_tokenizer_load(ctx, first, &t) == 0);
  CHECK(pg_tokenizer_encode(t, text, size, false, &want, &n) == 0);
  got = read_ids(first, "*_train_*.bin", &train, &shards, &longest);
  CHECK(memcmp(got, want, (size_t)train * 4) == 0);
  free(got);
  got = read_ids(first, "*_val_*.bin", &val, &shards, &longest);
  CHECK(train + val == n && memcmp(got, want + train, (size_t)val * 4) == 0);
  free(got);
  free(want);
  pg_tokenizer_free(t);
  free(text);
  data_folder_remove(folder);
}

/* ---- refusals -------------------------------------------------------------------------------- */
TEST(what_cannot_work_is_refused_and_leaves_nothing) {
  data_folder(folder);
  const char *good = data_path(folder, "good.txt"), *empty = data_path(folder, "empty.txt"),
             *missing = data_path(folder, "missing.txt"), *out = data_path(folder, "out");
  write_text(good, "some words, some words, some words", 34);
  write_text(empty, "", 0);
  pg_prepare_options o = options(&good, 1, out), bad = o;
  bad.texts = &empty;
  must_refuse(&bad, PG_EDATA, "empty.txt is empty");
  bad.texts = &missing;
  must_refuse(&bad, PG_ENOENT, "missing.txt");
  bad.texts = (const char *const[]){folder};
  must_refuse(&bad, PG_EINVAL, "regular");
  bad.text_count = 0;
  must_refuse(&bad, PG_EINVAL, "no text");
  static const double fractions[] = {0, 1, -0.5, 2, NAN};
  for (int i = 0; i < 5; i++) {
    bad = o;
    bad.val_fraction = fractions[i];
    must_refuse(&bad, PG_EINVAL, "val_fraction");
  }
  bad = o;
  bad.vocab = 256;
  must_refuse(&bad, PG_EINVAL, "vocab is 256, allowed are 257 to 65536");
  bad.vocab = 65537;
  must_refuse(&bad, PG_EINVAL, "65537");
  bad = o;
  bad.shard_tokens = 3;
  must_refuse(&bad, PG_EINVAL, "shard_tokens is 3");
  bad.shard_tokens = (int64_t)1 << 31;
  must_refuse(&bad, PG_EINVAL, "2147483648");
  bad = o;
  bad.name = "a/b";
  must_refuse(&bad, PG_EINVAL, "a/b");
  bad.name = "";
  must_refuse(&bad, PG_EINVAL, "name");
  bad = o;
  bad.out = "";
  must_refuse(&bad, PG_EINVAL, "output");
  bad.out = good; /* a file */
  must_refuse(&bad, PG_EEXIST, "good.txt");
  char *below = data_path(folder, "good.txt/out");
  bad.out = below;
  CHECK(pg_prepare(ctx, &bad, NULL) < 0 && strstr(pg_context_message(ctx), "good.txt"));
  bad.out = "/proc/perigee/out"; /* nobody can write there */
  CHECK(pg_prepare(ctx, &bad, NULL) < 0 && strstr(pg_context_message(ctx), "/proc/perigee"));
  bad = o;
  bad.tokenizer = missing;
  must_refuse(&bad, PG_ENOENT, "missing.txt");
  write_text(data_path(folder, "three.txt"), "abc", 3);
  bad.texts = (const char *const[]){data_path(folder, "three.txt")};
  bad.tokenizer = NULL;
  bad.vocab = 257;
  must_refuse(&bad, PG_EDATA, "3 tokens");
  must_prepare(&o, &(pg_prepare_report){0});
  must_refuse(&o, PG_EEXIST, "holds shards already");
  CHECK(mkdir(data_path(folder, "other"), 0777) == 0);
  write_text(data_path(folder, "other/notes"), "x", 1);
  bad = o;
  bad.out = data_path(folder, "other");
  must_refuse(&bad, PG_EEXIST, "not empty");
  data_folder_remove(folder);
}

/* A vocabulary of `count` tokens: 256 bytes and pairs of bytes, without merges. */
static void write_vocab(const char *path, int count) {
  char *text = malloc((size_t)count * 40), *to = text;
  uint32_t points[256];
  int n = 0;
  for (int i = 33; i < 127; i++) points[n++] = (uint32_t)i;
  for (int i = 161; i < 256; i++)
    if (i != 173) points[n++] = (uint32_t)i;
  for (uint32_t i = 256; n < 256; i++) points[n++] = i;
  *to++ = '{';
  for (int id = 0; id < count; id++) {
    to += sprintf(to, "%s\"\\u%04x", id ? "," : "", points[id < 256 ? id : (id - 256) / 256]);
    if (id >= 256) to += sprintf(to, "\\u%04x", points[id % 256]);
    to += sprintf(to, "\":%d", id);
  }
  *to++ = '}';
  write_text(path, text, (size_t)(to - text));
  free(text);
}

TEST(ids_of_more_than_sixteen_bits_are_refused) {
  data_folder(folder);
  const char *text = data_path(folder, "a.txt"), *vocab = data_path(folder, "vocab.json");
  write_text(text, "some words, some words", 22);
  write_text(data_path(folder, "merges.txt"), "#version: 0.2\n", 14);
  pg_prepare_options o = options(&text, 1, data_path(folder, "out"));
  o.tokenizer = vocab;
  write_vocab(vocab, 65537);
  must_refuse(&o, PG_EFORMAT, "ids up to 65536");
  write_vocab(vocab, 65536);
  pg_prepare_report r;
  must_prepare(&o, &r);
  CHECK(r.vocab == 65536 && r.train_tokens + r.val_tokens == 22);
  /* This vocabulary has no end-of-text token to put between two documents. */
  CHECK(pg_file_remove_tree(ctx, o.out) == 0);
  o.texts = (const char *const[]){text, text};
  o.text_count = 2;
  must_refuse(&o, PG_EUNSUPPORTED, "<|endoftext|>");
  data_folder_remove(folder);
}

typedef struct cancelling {
  const char *stage;
  int reports;
  double last;
} cancelling;

static void cancel_in_stage(void *self, const char *what, double fraction) {
  cancelling *c = self;
  CHECK(fraction >= 0 && fraction <= 1, "%s %g", what, fraction);
  c->reports++;
  if (strcmp(what, c->stage) == 0) pg_context_cancel(ctx);
}

TEST(cancelled_at_any_stage_nothing_is_left) {
  static const char *const stages[] = {"counting words", "training the tokenizer", "encoding",
                                       "writing shards"};
  const size_t size = 5000000;
  data_folder(folder);
  const char *text = data_path(folder, "a.txt");
  char *bytes = story(size);
  write_text(text, bytes, size);
  free(bytes);
  for (int i = 0; i < 4; i++) {
    cancelling c = {.stage = stages[i]};
    pg_prepare_options o = options(&text, 1, data_path(folder, "out"));
    o.shard_tokens = 1000000;
    o.vocab = 400;
    o.progress = cancel_in_stage;
    o.self = &c;
    must_refuse(&o, PG_ECANCELED, "cancelled");
    CHECK(c.reports > 0);
    pg_context_resume(ctx);
  }
  data_folder_remove(folder);
}

TEST(json_lines_are_documents) {
  static const char lines[] = "{\"text\": \"In the beginning\", \"id\": 7}\n\n"
                              "{\"text\": \"\"}\n{\"text\": \"caf\\u00e9\\u0000\\nand more\"}";
  static const char first[] = "In the beginning", second[] = "caf\xc3\xa9\0\nand more";
  int64_t n = 0, shards, longest, m = 0;
  int32_t *expected = NULL;
  pg_prepare_report r = {0}, same = {0};
  data_folder(folder);
  char *jsonl = strdup(data_path(folder, "t.jsonl")), *a = strdup(data_path(folder, "a.txt"));
  char *b = strdup(data_path(folder, "b.txt")), *out = strdup(data_path(folder, "out"));
  char *plain = strdup(data_path(folder, "plain"));
  write_text(jsonl, lines, sizeof lines - 1);
  write_text(a, first, sizeof first - 1);
  write_text(b, second, sizeof second - 1);
  const char *const one[] = {jsonl}, *const two[] = {a, b};
  pg_prepare_options o = options(one, 1, out), p = options(two, 2, plain);
  must_prepare(&o, &r);
  must_prepare(&p, &same);
  CHECK(r.vocab == same.vocab && r.train_tokens == same.train_tokens);
  int32_t *ids = read_ids(out, "*_train_*.bin", &n, &shards, &longest);
  expected = read_ids(plain, "*_train_*.bin", &m, &shards, &longest);
  CHECK(n == m && memcmp(ids, expected, (size_t)n * sizeof *ids) == 0,
        "the same as the documents' texts in files");
  free(ids);
  free(expected);
  data_folder_remove(out);
  o.field = "id";
  must_refuse(&o, PG_EFORMAT, "t.jsonl:1: the field is not a text, expected an object with a text");
  o.field = "body";
  must_refuse(&o, PG_EFORMAT, "t.jsonl:1: the field is missing");
  o.field = NULL;
  static const char *const bad[] = {"{\"text\": \"a\"}\n[1]\n", "{\"text\": \"a\"}\n{\"te",
                                    "{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n"};
  for (size_t i = 0; i < 3; i++) {
    write_text(jsonl, bad[i], strlen(bad[i]));
    must_refuse(&o, PG_EFORMAT, "t.jsonl:2");
  }
  write_text(jsonl, "\n\n", 2);
  must_refuse(&o, PG_EDATA, "0 tokens");
  free(jsonl);
  free(a);
  free(b);
  free(out);
  free(plain);
  data_folder_remove(folder);
}

int main(void) {
  ctx = data_context();
  RUN(documents_come_back_with_markers_between);
  RUN(split_shards_and_description);
  RUN(chunks_and_repetitions_change_nothing);
  RUN(what_cannot_work_is_refused_and_leaves_nothing);
  RUN(ids_of_more_than_sixteen_bits_are_refused);
  RUN(cancelled_at_any_stage_nothing_is_left);
  RUN(json_lines_are_documents);
  pg_context_free(ctx);
  return unit_report();
}
