/* The tokenizer: golden ids from Hugging Face, round trips, training and merging against plain
 * versions (CASES 19). With arguments it is the program of tokenizers_compare.py:
 *   tokenizer_test train TEXT VOCAB OUT | encode TOKENIZER TEXT | encode-special TOKENIZER TEXT */
#include "core/tokenizer_internal.h"
#include "core/files.h"
#include "core/json.h"
#include "data_files.h"

#define GOLDEN PG_TEST_DIR "/golden/tokenizer"

static pg_context *ctx;

static pg_tokenizer *must_load(const char *path) {
  pg_tokenizer *t = NULL;
  int status = pg_tokenizer_load(ctx, path, &t);
  CHECK(status == 0 && t, "%s", pg_context_message(ctx));
  if (status < 0) exit(unit_report() + 1);
  return t;
}

static int64_t must_encode(const pg_tokenizer *t, const char *text, size_t size, bool special,
                           int32_t **ids) {
  int64_t count = 0;
  int status = pg_tokenizer_encode(t, text, size, special, ids, &count);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  return count;
}

static void check_round_trip(const pg_tokenizer *t, const char *text, size_t size) {
  int32_t *ids;
  int64_t count = must_encode(t, text, size, false, &ids);
  size_t at = 0;
  bool same = true;
  for (int64_t i = 0; i < count && same; i++) {
    size_t length;
    const char *bytes = pg_tokenizer_bytes(t, ids[i], &length);
    same = bytes && length <= size - at && memcmp(bytes, text + at, length) == 0;
    at += length;
  }
  CHECK(same && at == size, "%.60s", text);
  free(ids);
}

/* A small generator, so that the texts are the same everywhere. */
static uint64_t random_state;
static uint32_t draw(uint32_t below) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((random_state >> 33) % below);
}

/* ---- golden ids ------------------------------------------------------------------------------ */
static size_t from_hex(const char *hex, char *out) {
  size_t n = strlen(hex) / 2;
  for (size_t i = 0; i < n; i++) {
    unsigned x;
    sscanf(hex + 2 * i, "%2x", &x);
    out[i] = (char)x;
  }
  return n;
}

static void check_golden(const pg_tokenizer *t, const char *what) {
  json_t *cases = NULL, *item;
  size_t i, k, checked = 0;
  CHECK(pg__json_load(ctx, GOLDEN "/strings.json", 0, &cases) == 0, "%s", pg_context_message(ctx));
  json_array_foreach(cases, i, item) {
    const char *hex = json_string_value(json_object_get(item, "hex"));
    const json_t *want = json_object_get(item, "ids");
    char *text = malloc(strlen(hex) / 2 + 1);
    size_t size = from_hex(hex, text);
    int32_t *ids;
    int64_t count =
        must_encode(t, text, size, json_is_true(json_object_get(item, "special")), &ids);
    CHECK(count == (int64_t)json_array_size(want), "%s, string %zu: %lld ids, want %zu", what, i,
          (long long)count, json_array_size(want));
    for (k = 0; k < json_array_size(want) && (int64_t)k < count; k++)
      CHECK(ids[k] == json_integer_value(json_array_get(want, k)), "%s, string %zu, id %zu", what,
            i, k);
    checked += (size_t)count;
    free(ids);
    check_round_trip(t, text, size);
    free(text);
  }
  CHECK(checked > 1000, "only %zu ids", checked);
  json_decref(cases);
}

TEST(golden_ids_from_every_form_of_file) {
  static const char *const paths[] = {GOLDEN, GOLDEN "/tokenizer.json", GOLDEN "/pairs.json",
                                      GOLDEN "/vocab.json"};
  for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
    pg_tokenizer *t = must_load(paths[i]);
    CHECK(pg_tokenizer_vocab(t) == 600 && pg_tokenizer_end_of_text(t) == 0);
    check_golden(t, paths[i]);
    pg_tokenizer_free(t);
  }
}

TEST(other_names_of_the_two_files) {
  char folder[64], command[512];
  data_folder(folder);
  snprintf(command, sizeof command,
           "cd %s && cp %s/vocab.json encoder.json && cp %s/merges.txt vocab.bpe", folder, GOLDEN,
           GOLDEN);
  CHECK(system(command) == 0);
  pg_tokenizer *t = must_load(folder);
  check_golden(t, "encoder.json");
  pg_tokenizer_free(t);
  snprintf(command, sizeof command,
           "cd %s && mv encoder.json gpt2-vocab.json && sed 's/$/\\r/' vocab.bpe > gpt2-merges.txt",
           folder);
  CHECK(system(command) == 0);
  t = must_load(data_path(folder, "gpt2-vocab.json"));
  check_golden(t, "gpt2-vocab.json");
  pg_tokenizer_free(t);
  CHECK(pg_tokenizer_load(ctx, folder, &t) == PG_ENOENT && t == NULL);
  CHECK(strstr(pg_context_message(ctx), "tokenizer.json"), "%s", pg_context_message(ctx));
  CHECK(pg_tokenizer_load(ctx, "/nonexistent", &t) == PG_ENOENT);
  data_folder_remove(folder);
}

TEST(saving_keeps_everything) {
  char folder[64], *first, *second;
  size_t n, m;
  data_folder(folder);
  pg_tokenizer *t = must_load(GOLDEN "/pairs.json");
  CHECK(pg_tokenizer_save(t, data_path(folder, "a.json")) == 0, "%s", pg_context_message(ctx));
  pg_tokenizer_free(t);
  t = must_load(data_path(folder, "a.json"));
  check_golden(t, "saved");
  CHECK(pg_tokenizer_save(t, data_path(folder, "b.json")) == 0);
  pg_tokenizer_free(t);
  CHECK(pg_file_read(ctx, data_path(folder, "a.json"), 0, &first, &n) == 0);
  CHECK(pg_file_read(ctx, data_path(folder, "b.json"), 0, &second, &m) == 0);
  CHECK(n == m && memcmp(first, second, n) == 0);
  free(first);
  free(second);
  data_folder_remove(folder);
}

TEST(gpt2_pattern_as_a_split) {
  json_t *root = NULL;
  CHECK(pg__json_load(ctx, GOLDEN "/tokenizer.json", 0, &root) == 0);
  json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex",
                            PG_GPT2_PATTERN, "behavior", "Isolated", "invert", 0);
  json_t *level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                            "trim_offsets", 1, "use_regex", 0);
  json_object_set_new(
      root, "pre_tokenizer",
      json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers", split, level));
  char *text = pg__json_print(root, 0);
  pg_tokenizer *t = NULL;
  CHECK(pg__tokenizer_parse(ctx, "split", text, strlen(text), &t) == 0, "%s",
        pg_context_message(ctx));
  if (t) check_golden(t, "split");
  pg_tokenizer_free(t);
  free(text);
  json_decref(root);
}

/* ---- bytes ----------------------------------------------------------------------------------- */
TEST(the_alphabet_is_a_bijection) {
  uint8_t order[256];
  pg__byte_order(order);
  for (int i = 0; i < 256; i++) {
    CHECK(pg__byte_of(pg__code_point_of((uint8_t)i)) == i);
    if (i) CHECK(pg__code_point_of(order[i - 1]) < pg__code_point_of(order[i]));
  }
  /* GPT-2: "!" is token 0, the space U+0120, the line feed U+010A. */
  CHECK(order[0] == '!' && pg__code_point_of(' ') == 0x120 && pg__code_point_of('\n') == 0x10a);
  CHECK(pg__byte_of(' ') == -1 && pg__byte_of(0x144) == -1 && pg__byte_of(0x1f600) == -1);
}

TEST(utf8_is_checked_as_unicode_says) {
  static const struct {
    const char *text;
    size_t size, valid;
  } cases[] = {{"abc", 3, 3},
               {"\xc3\xa4", 2, 2},
               {"a\xc3", 2, 1},
               {"\xc0\x80", 2, 0},
               {"\xc1\xbf", 2, 0},
               {"\xe0\x9f\xbf", 3, 0},
               {"\xe0\xa0\x80", 3, 3},
               {"\xed\x9f\xbf", 3, 3},
               {"\xed\xa0\x80", 3, 0},
               {"\xf0\x8f\xbf\xbf", 4, 0},
               {"\xf0\x90\x80\x80", 4, 4},
               {"\xf4\x8f\xbf\xbf", 4, 4},
               {"\xf4\x90\x80\x80", 4, 0},
               {"\xf5\x80\x80\x80", 4, 0},
               {"12345678\xff", 9, 8},
               {"\xf0\x9f\x98", 3, 0},
               {"x\0y", 3, 3},
               {"", 0, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    CHECK(pg__utf8_prefix(cases[i].text, cases[i].size) == cases[i].valid, "case %zu", i);
}

TEST(any_bytes_round_trip) {
  pg_tokenizer *t = must_load(GOLDEN);
  static const char *const texts[] = {"\xff\xfe",
                                      "a\xff b",
                                      "\xf0\x9f\x98",
                                      "cut \xf0\x9f\x98 emoji",
                                      "\xed\xa0\x80\xed\xb0\x80",
                                      "\x80 \x80\x80  \x80",
                                      "\xc3(",
                                      "  \xff  \xff"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    check_round_trip(t, texts[i], strlen(texts[i]));
  char text[300];
  random_state = 5;
  for (int round = 0; round < 400; round++) {
    size_t n = draw(sizeof text);
    static const char near[] = "  \t\n\xc2\xa0\xe3\x80\x80\xf0\x9f\x98\x80\xffs't a1!";
    for (size_t i = 0; i < n; i++) text[i] = round % 2 ? (char)draw(256) : near[draw(sizeof near)];
    check_round_trip(t, text, n);
  }
  pg_tokenizer_free(t);
}

/* A text cut where pg__safe_cut says has the same ids. */
TEST(safe_cuts_do_not_change_ids) {
  pg_tokenizer *t = must_load(GOLDEN);
  static const char *const parts[] = {" ",
                                      "  ",
                                      "\n",
                                      "\t",
                                      "a",
                                      "the",
                                      "'s",
                                      "'",
                                      "1",
                                      "!",
                                      "\xc2\xa0",
                                      "\xe3\x80\x80",
                                      "\xe2\x80\xa8",
                                      "\xe1\xa0\x8e",
                                      "\xc3\xa4",
                                      "\xf0\x9f\x98\x80",
                                      "\xff",
                                      "\xc2",
                                      "\x85",
                                      "\xa0"};
  random_state = 9;
  int cuts = 0;
  for (int round = 0; round < 3000; round++) {
    char text[256] = "";
    size_t n = 0;
    for (uint32_t k = 2 + draw(20); k > 0; k--) {
      const char *part = parts[draw(sizeof parts / sizeof *parts)];
      strcpy(text + n, part);
      n += strlen(part);
    }
    size_t cut = pg__safe_cut(text, n);
    CHECK(cut < n);
    if (cut == 0) continue;
    cuts++;
    int32_t *whole, *left, *right;
    int64_t w = must_encode(t, text, n, false, &whole);
    int64_t l = must_encode(t, text, cut, false, &left);
    int64_t r = must_encode(t, text + cut, n - cut, false, &right);
    CHECK(w == l + r && memcmp(whole, left, (size_t)l * 4) == 0 &&
              memcmp(whole + l, right, (size_t)r * 4) == 0,
          "round %d", round);
    free(whole);
    free(left);
    free(right);
  }
  CHECK(cuts > 1000, "%d", cuts);
  CHECK(pg__safe_cut("abcdef", 6) == 0 && pg__safe_cut("a b", 3) == 1 && pg__safe_cut("", 0) == 0);
  pg_tokenizer_free(t);
}

TEST(the_interpreter_gives_the_same_pieces) {
  char text[2000];
  pg__pretokenizer a, b;
  CHECK(pg__pretokenizer_init(ctx, &a) == 0 && pg__pretokenizer_init(ctx, &b) == 0);
  b.jit = false;
  random_state = 3;
  for (int round = 0; round < 50; round++) {
    static const char near[] = "  \t\n\xc2\xa0\xe3\x80\x80\xf0\x9f\x98\x80\xffs't a1!";
    for (size_t i = 0; i < sizeof text; i++) text[i] = near[draw(sizeof near - 1)];
    pg__pieces x = pg__pieces_of(&a, text, sizeof text), y = pg__pieces_of(&b, text, sizeof text);
    const char *p, *q;
    size_t n, m;
    int more;
    do {
      more = pg__pieces_next(&x, &p, &n);
      CHECK(pg__pieces_next(&y, &q, &m) == more && (more != 1 || (n == m && p == q)));
    } while (more == 1);
    CHECK(more == 0 && x.at == sizeof text);
  }
  pg__pretokenizer_free(&a);
  pg__pretokenizer_free(&b);
}

TEST(the_marker_is_text_unless_allowed) {
  pg_tokenizer *t = must_load(GOLDEN);
  const char *text = "a<|endoftext|>b";
  int32_t *ids;
  int64_t count = must_encode(t, text, strlen(text), false, &ids);
  for (int64_t i = 0; i < count; i++) CHECK(ids[i] != pg_tokenizer_end_of_text(t));
  free(ids);
  count = must_encode(t, text, strlen(text), true, &ids);
  CHECK(count == 3 && ids[1] == pg_tokenizer_end_of_text(t));
  free(ids);
  CHECK(pg_tokenizer_find(t, "<|endoftext|>", 13) == pg_tokenizer_end_of_text(t));
  CHECK(pg_tokenizer_find(t, "the", 3) > 0 && pg_tokenizer_find(t, "no such token", 13) == -1);
  size_t size;
  CHECK(pg_tokenizer_bytes(t, -1, &size) == NULL && pg_tokenizer_bytes(t, 600, &size) == NULL);
  pg_tokenizer_free(t);
}

/* ---- training against the definition -----------------------------------------------------------
 */
typedef struct plain_word {
  int count, size;
  int32_t ids[64];
} plain_word;

/* Merges by recounting everything; words as pieces with their repetitions. */
static int plain_train(plain_word *words, int n, int merges, pg__merge *out) {
  for (int done = 0; done < merges; done++) {
    static int64_t counts[400][400];
    memset(counts, 0, sizeof counts);
    for (int w = 0; w < n; w++)
      for (int i = 0; i + 1 < words[w].size; i++)
        counts[words[w].ids[i]][words[w].ids[i + 1]] += words[w].count;
    int64_t best = 0;
    int32_t left = 0, right = 0, id = 256 + done;
    for (int32_t a = 0; a < 400; a++)
      for (int32_t b = 0; b < 400; b++)
        if (counts[a][b] > best) best = counts[a][b], left = a, right = b;
    if (best == 0) return done;
    out[done] = (pg__merge){left, right, id};
    for (int w = 0; w < n; w++) {
      int k = 0;
      for (int i = 0; i < words[w].size; i++) {
        bool merge =
            words[w].ids[i] == left && i + 1 < words[w].size && words[w].ids[i + 1] == right;
        words[w].ids[k++] = merge ? id : words[w].ids[i];
        i += merge;
      }
      words[w].size = k;
    }
  }
  return merges;
}

TEST(training_is_what_the_definition_says) {
  uint8_t order[256];
  int32_t byte_ids[256];
  pg__byte_order(order);
  for (int i = 0; i < 256; i++) byte_ids[order[i]] = i;
  random_state = 1;
  int compared = 0;
  for (int round = 0; round < 60; round++) {
    char text[1200];
    size_t n = 0;
    plain_word words[40];
    int count = 1 + (int)draw(40);
    uint32_t letters = 1 + draw(4), longest = 2 + draw(round % 3 == 0 ? 28 : 9);
    for (int w = 0; w < count; w++) {
      words[w] = (plain_word){.count = 1, .size = 1 + (int)draw(longest)};
      for (int i = 0; i < words[w].size; i++) {
        text[n] = i == 0 ? ' ' : (char)('a' + draw(letters));
        words[w].ids[i] = byte_ids[(uint8_t)text[n++]];
      }
      if (words[w].size == 1) { /* a lone space would join the next word's */
        text[n] = 'z';
        words[w].ids[words[w].size++] = byte_ids[(uint8_t)text[n++]];
      }
    }
    pg__merge want[60];
    int merges = plain_train(words, count, 60, want);
    pg_tokenizer *t = NULL;
    pg_text document = {text, n};
    CHECK(pg_tokenizer_train(ctx, &document, 1, 257 + 60, NULL, NULL, &t) == 0, "%s",
          pg_context_message(ctx));
    /* The plain version gives a new id to every merge: compare up to a merge that makes a token
     * which exists already. */
    for (int i = 0; t && i < merges && i < t->merge_count; i++) {
      CHECK(memcmp(&t->merges[i], &want[i], 2 * sizeof(int32_t)) == 0, "round %d merge %d", round,
            i);
      if (t->merges[i].result != want[i].result) break;
      compared++;
    }
    CHECK(t && t->merge_count >= (merges < 60 ? merges : 60), "round %d", round);
    pg_tokenizer_free(t);
  }
  CHECK(compared > 1000, "%d", compared);
}

static void plain_encode(const pg_tokenizer *t, const char *piece, size_t size, int32_t *ids,
                         int64_t *count) {
  *count = (int64_t)size;
  for (size_t i = 0; i < size; i++) ids[i] = t->byte_ids[(uint8_t)piece[i]];
  for (;;) {
    int64_t best = t->merge_count, at = -1;
    for (int64_t i = 0; i + 1 < *count; i++)
      for (int64_t m = 0; m < best; m++)
        if (t->merges[m].left == ids[i] && t->merges[m].right == ids[i + 1]) best = m, at = i;
    if (at < 0) return;
    ids[at] = t->merges[best].result;
    memmove(ids + at + 1, ids + at + 2, (size_t)(*count - at - 2) * sizeof *ids);
    --*count;
  }
}

TEST(encoding_is_what_the_definition_says) {
  pg_tokenizer *t = must_load(GOLDEN);
  random_state = 11;
  for (int round = 0; round < 300; round++) {
    char piece[80];
    int32_t want[80], *ids;
    int64_t n, count;
    size_t size = 1 + draw(79);
    for (size_t i = 0; i < size; i++) piece[i] = "theandighrsofwdwGBL"[draw(19)];
    plain_encode(t, piece, size, want, &n);
    for (int twice = 0; twice < 2; twice++) { /* the second time from the cache */
      count = must_encode(t, piece, size, false, &ids);
      CHECK(count == n && memcmp(ids, want, (size_t)n * 4) == 0, "%.*s", (int)size, piece);
      free(ids);
    }
  }
  pg_tokenizer_free(t);
}

static void count_calls(void *self, int64_t merges, int64_t total) {
  CHECK(merges >= 0 && merges <= total);
  ++*(int *)self;
}
static void cancel_at_once(void *self, int64_t merges, int64_t total) {
  (void)self, (void)merges, (void)total;
  pg_context_cancel(ctx);
}

TEST(trained_vocabularies) {
  char *text;
  size_t size;
  pg_tokenizer *t = NULL;
  int calls = 0;
  CHECK(pg_file_read(ctx, GOLDEN "/strings.json", 0, &text, &size) == 0);
  pg_text documents[2] = {{text, size / 2}, {text + size / 2, size - size / 2}};
  CHECK(pg_tokenizer_train(ctx, documents, 2, 400, count_calls, &calls, &t) == 0);
  CHECK(t && pg_tokenizer_vocab(t) == 400 && pg_tokenizer_end_of_text(t) == 399 && calls > 2);
  check_round_trip(t, text, size);
  pg_tokenizer_free(t);
  /* As many merges as there are; the smallest vocabulary; what is refused. */
  pg_text tiny = {"abab", 4};
  CHECK(pg_tokenizer_train(ctx, &tiny, 1, 1000, NULL, NULL, &t) == 0);
  CHECK(pg_tokenizer_vocab(t) == 259 && pg_tokenizer_find(t, "abab", 4) == 257);
  pg_tokenizer_free(t);
  CHECK(pg_tokenizer_train(ctx, NULL, 0, 257, NULL, NULL, &t) == 0 && pg_tokenizer_vocab(t) == 257);
  pg_tokenizer_free(t);
  CHECK(pg_tokenizer_train(ctx, &tiny, 1, 256, NULL, NULL, &t) == PG_EINVAL && t == NULL);
  CHECK(pg_tokenizer_train(ctx, &tiny, 1, 65537, NULL, NULL, &t) == PG_EINVAL);
  CHECK(strstr(pg_context_message(ctx), "65537"));
  CHECK(pg_tokenizer_train(ctx, documents, 2, 600, cancel_at_once, NULL, &t) == PG_ECANCELED);
  CHECK(t == NULL);
  pg_context_resume(ctx);
  free(text);
}

/* One piece of a megabyte costs no more than other text: a quadratic loop would take hours. */
TEST(long_pieces_are_no_special_case) {
  size_t size = 1 << 20;
  char *text = malloc(size);
  for (int kind = 0; kind < 4; kind++) {
    for (size_t i = 0; i < size; i++)
      text[i] = kind == 0   ? 'a'
                : kind == 1 ? ' '
                : kind == 2 ? "acgt"[draw(4)]
                            : (char)(128 + draw(64));
    pg_text document = {text, size};
    pg_tokenizer *t = NULL;
    CHECK(pg_tokenizer_train(ctx, &document, 1, 600, NULL, NULL, &t) == 0, "%s",
          pg_context_message(ctx));
    check_round_trip(t, text, size);
    pg_tokenizer_free(t);
  }
  free(text);
}

static int tool(int argc, char **argv) {
  pg_tokenizer *t = NULL;
  char *text = NULL;
  size_t size;
  int32_t *ids = NULL;
  int64_t count = 0;
  bool train = argc == 5 && strcmp(argv[1], "train") == 0;
  int status = pg_file_read(ctx, argv[train ? 2 : 3], 0, &text, &size);
  if (status == 0 && train) {
    pg_text document = {text, size};
    status = pg_tokenizer_train(ctx, &document, 1, atoi(argv[3]), NULL, NULL, &t);
    if (status == 0) status = pg_tokenizer_save(t, argv[4]);
  } else if (status == 0) {
    status = pg_tokenizer_load(ctx, argv[2], &t);
    bool special = strcmp(argv[1], "encode-special") == 0;
    if (status == 0) status = pg_tokenizer_encode(t, text, size, special, &ids, &count);
    if (status == 0 && fwrite(ids, sizeof *ids, (size_t)count, stdout) != (size_t)count) status = 1;
  }
  if (status != 0) fprintf(stderr, "%s\n", pg_context_message(ctx));
  free(ids);
  free(text);
  pg_tokenizer_free(t);
  pg_context_free(ctx);
  return status != 0;
}

int main(int argc, char **argv) {
  ctx = data_context();
  if (argc > 3) return tool(argc, argv);
  RUN(golden_ids_from_every_form_of_file);
  RUN(other_names_of_the_two_files);
  RUN(saving_keeps_everything);
  RUN(gpt2_pattern_as_a_split);
  RUN(the_alphabet_is_a_bijection);
  RUN(utf8_is_checked_as_unicode_says);
  RUN(any_bytes_round_trip);
  RUN(safe_cuts_do_not_change_ids);
  RUN(the_interpreter_gives_the_same_pieces);
  RUN(the_marker_is_text_unless_allowed);
  RUN(training_is_what_the_definition_says);
  RUN(encoding_is_what_the_definition_says);
  RUN(trained_vocabularies);
  RUN(long_pieces_are_no_special_case);
  pg_context_free(ctx);
  return unit_report();
}
