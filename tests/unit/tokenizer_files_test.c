/* Malformed and unsupported tokenizer files: refused with the reason. */
#include "core/tokenizer_internal.h"
#include "data_files.h"

static pg_context *ctx;

#define ALL_BYTES "@" /* replaced by entries for the 256 bytes, ids 0 to 255 */
#define LEVEL "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"

static char *expand(const char *text) {
  char *out = malloc(strlen(text) + 8192), *to = out;
  for (; *text; text++) {
    if (*text != '@') {
      *to++ = *text;
      continue;
    }
    for (int i = 0; i < 256; i++) {
      uint32_t point = pg__code_point_of((uint8_t)i);
      to += sprintf(to, "%s\"\\u%04x\":%d", i ? "," : "", point, i);
    }
  }
  *to = 0;
  return out;
}

TEST(malformed_files_are_refused_with_the_reason) {
  static const struct {
    const char *text;
    int code;
    const char *part;
  } cases[] = {
      {"", PG_EFORMAT, "case"},
      {"[1,2]", PG_EFORMAT, "no \"model\""},
      {"{\"model\":3}", PG_EFORMAT, "a number"},
      {"{\"model\":{\"type\":\"Unigram\"}}", PG_EUNSUPPORTED, "Unigram"},
      {"{\"model\":{\"type\":\"BPE\"}}", PG_EUNSUPPORTED, "pre-tokeniser"},
      {"{" LEVEL ",\"model\":{\"type\":\"BPE\"}}", PG_EFORMAT, "nothing"},
      {"{" LEVEL ",\"model\":{\"vocab\":[],\"merges\":[]}}", PG_EFORMAT, "an array"},
      {"{" LEVEL ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}", PG_EUNSUPPORTED, "byte 0x00"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@},\"merges\":{}}}", PG_EFORMAT, "an object"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":300},\"merges\":[]}}", PG_EFORMAT, "300"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":-1},\"merges\":[]}}", PG_EFORMAT, "-1"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":7},\"merges\":[]}}", PG_EFORMAT, "id 7"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":4611686018427387904},\"merges\":[]}}", PG_EFORMAT,
       "4611686018427387904"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256.5},\"merges\":[]}}", PG_EFORMAT, "integer"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256,\"ab\":257},\"merges\":[]}}", PG_EFORMAT, ""},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"a b\":256},\"merges\":[]}}", PG_EFORMAT, "alphabet"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"\\u4e2d\":256},\"merges\":[]}}", PG_EFORMAT,
       "alphabet"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"\":256},\"merges\":[]}}", PG_EFORMAT, "empty"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@},\"merges\":[\"a b\"]}}", PG_EFORMAT, "\"ab\" is not"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[\"a xy\"]}}", PG_EFORMAT, "xy"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[\"ab\"]}}", PG_EFORMAT, "space"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[\" ab\"]}}", PG_EFORMAT,
       "space"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[\"a b c\"]}}", PG_EFORMAT,
       "space"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[[\"a\"]]}}", PG_EFORMAT, "pair"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[[\"a\",1]]}}", PG_EFORMAT,
       "pair"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[5]}}", PG_EFORMAT, "a number"},
      {"{" LEVEL ",\"model\":{\"vocab\":{@,\"ab\":256},\"merges\":[\"a b\",\"a b\"]}}", PG_EFORMAT,
       "repeats"},
      {"{" LEVEL ",\"added_tokens\":7,\"model\":{\"vocab\":{@},\"merges\":[]}}", PG_EFORMAT,
       "added_tokens"},
      {"{" LEVEL ",\"added_tokens\":[7],\"model\":{\"vocab\":{@},\"merges\":[]}}", PG_EFORMAT,
       "content"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":256,\"content\":\"\"}],\"model\":{\"vocab\":{@},"
       "\"merges\":[]}}",
       PG_EFORMAT, "content"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":9,\"content\":\"<x>\"}],\"model\":{\"vocab\":{@},"
       "\"merges\":[]}}",
       PG_EFORMAT, "id 9"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":255,\"content\":\"!\"}],\"model\":{\"vocab\":{@},"
       "\"merges\":[]}}",
       PG_EFORMAT, "has id 255"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":256,\"content\":\"<x>\"},{\"id\":256,\"content\":"
       "\"<x>\"}],\"model\":{\"vocab\":{@},\"merges\":[]}}",
       PG_EFORMAT, "256"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":256,\"content\":\"<x>\",\"lstrip\":true}],\"model\":{"
       "\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "lstrip"},
      {"{" LEVEL ",\"added_tokens\":[{\"id\":256,\"content\":\" \"}],\"model\":{\"vocab\":{@},"
       "\"merges\":[]}}",
       PG_EFORMAT, "same bytes"},
      {"{" LEVEL ",\"normalizer\":{\"type\":\"NFC\"},\"model\":{\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "NFC"},
      {"{" LEVEL ",\"model\":{\"dropout\":0.1,\"vocab\":{@},\"merges\":[]}}", PG_EUNSUPPORTED,
       "dropout"},
      {"{" LEVEL ",\"model\":{\"ignore_merges\":true,\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "ignore_merges"},
      {"{" LEVEL ",\"model\":{\"end_of_word_suffix\":\"</w>\",\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "end_of_word_suffix"},
      {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true},\"model\":{\"vocab\":"
       "{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "add_prefix_space"},
      {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},"
       "\"model\":{\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "use_regex"},
      {"{\"pre_tokenizer\":{\"type\":\"Metaspace\"},\"model\":{\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "Metaspace"},
      {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
       "\"pattern\":{\"Regex\":\"x\"},\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\","
       "\"add_prefix_space\":false}]},\"model\":{\"vocab\":{@},\"merges\":[]}}",
       PG_EUNSUPPORTED, "Sequence"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *text = expand(cases[i].text);
    pg_tokenizer *t = (pg_tokenizer *)1;
    int status = pg__tokenizer_parse(ctx, "case", text, strlen(text), &t);
    CHECK(status == cases[i].code && t == NULL, "case %zu: %d, %s", i, status,
          pg_context_message(ctx));
    CHECK(strstr(pg_context_message(ctx), cases[i].part) && strstr(pg_context_message(ctx), "case"),
          "case %zu: \"%s\" lacks \"%s\"", i, pg_context_message(ctx), cases[i].part);
    free(text);
  }
  /* Nesting of 10^5 levels. */
  char *deep = malloc(100001);
  memset(deep, '[', 100000);
  pg_tokenizer *t;
  CHECK(pg__tokenizer_parse(ctx, "case", deep, 100000, &t) == PG_EFORMAT);
  free(deep);
  char *vocab = expand("{@,\"ab\":256}");
  CHECK(pg__tokenizer_parse_pair(ctx, "v", vocab, strlen(vocab), "m", "a b\nab c\n", 9, &t) ==
        PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "m: merge 1"), "%s", pg_context_message(ctx));
  CHECK(pg__tokenizer_parse_pair(ctx, "v", vocab, strlen(vocab), "m", "a b", 3, &t) == 0);
  CHECK(pg_tokenizer_end_of_text(t) == -1);
  pg_tokenizer_free(t);
  free(vocab);
}

int main(void) {
  ctx = data_context();
  RUN(malformed_files_are_refused_with_the_reason);
  pg_context_free(ctx);
  return unit_report();
}
