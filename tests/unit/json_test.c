/* JSON: shortest reals in any locale, strict parsing with a place for every complaint, printing. */
#include "core/files.h"
#include "core/json.h"
#include "core/random.h"
#include "temporary.h"
#include "unit.h"

static pg_context *ctx;

static double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Significant digits of a printed number: those before the exponent, outer zeros not counted. */
static int significant(const char *text) {
  int n = 0, zeros = 0;
  for (; *text && *text != 'e'; text++) {
    if (*text < '0' || *text > '9' || (*text == '0' && n == 0)) continue;
    zeros = *text == '0' ? zeros + 1 : 0;
    n++;
  }
  return n - zeros;
}

/* Whether some decimal of `digits` digits reads back as x: the nearest, or one to either side. */
static int representable(double x, int digits) {
  char text[40];
  snprintf(text, sizeof text, "%.*e", digits - 1, x);
  if (strtod(text, NULL) == x) return 1;
  char *last = strchr(text, 'e') - 1;
  if (*last < '9') {
    ++*last;
    if (strtod(text, NULL) == x) return 1;
    --*last;
  }
  if (*last > '0') {
    --*last;
    if (strtod(text, NULL) == x) return 1;
  }
  return 0;
}

/* Grammar of JSON: -? (0 | [1-9][0-9]*) then a fraction or an exponent, as a real must have. */
static int is_json_real(const char *t) {
  int real = 0;
  t += *t == '-';
  if (*t == '0')
    t++;
  else if (*t >= '1' && *t <= '9')
    t += strspn(t, "0123456789");
  else
    return 0;
  if (*t == '.') {
    const size_t n = strspn(++t, "0123456789");
    if (!n) return 0;
    t += n;
    real = 1;
  }
  if (*t == 'e') {
    t++;
    t += *t == '-';
    const size_t n = strspn(t, "0123456789");
    if (!n) return 0;
    t += n;
    real = 1;
  }
  return real && *t == 0;
}

TEST(chosen_reals) {
  static const struct {
    double x;
    const char *want;
  } cases[] = {
      {0, "0.0"},
      {-0.0, "-0.0"},
      {1, "1.0"},
      {3, "3.0"},
      {-2.5, "-2.5"},
      {0.1, "0.1"},
      {1e-10, "1e-10"},
      {1e-4, "0.0001"},
      {1.5e-5, "1.5e-5"},
      {100000, "100000.0"},
      {1234567890123456, "1234567890123456.0"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e16"},
      {1e22, "1e22"},
      {1e23, "1e23"},
      {0.30000000000000004, "0.30000000000000004"},
      {1.0 / 3, "0.3333333333333333"},
      {1.7976931348623157e308, "1.7976931348623157e308"},
      {2.2250738585072014e-308, "2.2250738585072014e-308"},
      {5e-324, "5e-324"},
      {1e-323, "1e-323"},
      {0x1p-1017, "7.120236347223045e-307"}, /* the nearest 16-digit decimal does not read back */
      {(double)9007199254740993, "9007199254740992.0"},
      {NAN, "null"},
      {INFINITY, "null"},
      {-INFINITY, "null"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char out[32];
    pg_format_real(cases[i].x, out);
    CHECK(strcmp(out, cases[i].want) == 0, "%s, want %s", out, cases[i].want);
  }
}

/* x prints as JSON, reads back as itself, and `shortest` asks that one digit less cannot do so. */
static int check_real(double x, int shortest) {
  char out[32];
  memset(out, '#', sizeof out);
  pg_format_real(x, out);
  if (!memchr(out, 0, sizeof out)) return 0;
  if (!isfinite(x)) return strcmp(out, "null") == 0;
  const double back = strtod(out, NULL);
  if (memcmp(&back, &x, sizeof x) != 0 || !is_json_real(out)) return 0;
  const int digits = significant(out);
  return !shortest || digits <= 1 || !representable(fabs(x), digits - 1);
}

TEST(random_reals_round_trip_and_are_shortest) {
  int failed = 0;
  for (uint64_t i = 0; i < 60000 && failed < 5; i++) {
    uint32_t words[4];
    pg_philox(5, 0, i, words);
    const uint64_t bits = words[0] | (uint64_t)words[1] << 32;
    float single;
    memcpy(&single, &words[2], sizeof single);
    const double candidates[] = {
        from_bits(bits),                            /* any double */
        from_bits(bits & 0x800fffffffffffffu),      /* denormal */
        (double)single,                             /* an fp32 number */
        (double)(words[3] % 2000000) / 1000 - 1000, /* a few digits */
        (double)(int64_t)(bits >> (words[3] % 60)), /* an integer */
    };
    for (int k = 0; k < 5; k++)
      if (!check_real(candidates[k], i % 4 == 0)) {
        char out[32];
        pg_format_real(candidates[k], out);
        CHECK(0, "%a prints as %s", candidates[k], out);
        failed++;
      }
  }
  for (int k = -1074; k < 1024; k++) CHECK(check_real(ldexp(1, k), 1), "2^%d", k);
}

static int parse(const char *text, json_t **out) {
  return pg__json_parse(ctx, text, strlen(text), "settings", out);
}

TEST(parsing) {
  json_t *value;
  CHECK(parse("{\"a\": [1, 2.5, true, null, \"\\u20ac\"]}", &value) == 0);
  json_t *list = json_object_get(value, "a");
  CHECK(json_integer_value(json_array_get(list, 0)) == 1);
  CHECK(json_real_value(json_array_get(list, 1)) == 2.5);
  CHECK(strcmp(json_string_value(json_array_get(list, 4)), "\u20ac") == 0);
  json_decref(value);
  CHECK(parse("3", &value) == 0 && json_integer_value(value) == 3);
  json_decref(value);
  CHECK(parse(" {}  \n", &value) == 0);
  json_decref(value);
  static const char *const refused[][2] = {
      {"{\"a\": 1,\n \"a\": 2}", "settings, line 2, column"}, /* a duplicate */
      {"{\"a\": 1,\n\n  oops}", "settings, line 3, column"},
      {"[1, 2", "line 1"},
      {"", "settings"},
      {"{\"a\": 1} x", "line 1"},
      {"[NaN]", "line 1"},
      {"[1e999]", "line 1"},
      {"[99999999999999999999]", "line 1"},
      {"[01]", "line 1"},
      {"[1,]", "line 1"},
      {"\"\xff\xfe\"", "settings"}, /* not UTF-8 */
      {"{\"a\": {\"b\": 1, \"b\": 1}}", "line 1"},
  };
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    value = (json_t *)&value;
    CHECK(parse(refused[i][0], &value) == PG_EFORMAT && !value, "case %zu", i);
    CHECK(strstr(pg_context_message(ctx), refused[i][1]), "case %zu: %s", i,
          pg_context_message(ctx));
  }
}

TEST(nesting_is_limited) {
  char text[300];
  json_t *value;
  for (int depth = PG_JSON_DEPTH; depth <= PG_JSON_DEPTH + 1; depth++) {
    memset(text, '[', (size_t)depth);
    memset(text + depth, ']', (size_t)depth);
    text[2 * depth] = 0;
    const int status = parse(text, &value);
    CHECK(status == (depth == PG_JSON_DEPTH ? 0 : PG_EFORMAT), "depth %d: %d", depth, status);
    json_decref(value);
  }
  CHECK(strstr(pg_context_message(ctx), "line 1, column 65: nested deeper than 64"), "%s",
        pg_context_message(ctx));
  /* Brackets in strings do not nest, also behind an escaped quote. */
  memcpy(text, "[\"\\\"", 4);
  memset(text + 4, '[', 200);
  memcpy(text + 204, "\"]", 3);
  CHECK(parse(text, &value) == 0, "%s", pg_context_message(ctx));
  json_decref(value);
  const size_t many = 1000000;
  char *deep = malloc(many);
  memset(deep, '[', many);
  CHECK(pg__json_parse(ctx, deep, many, "deep", &value) == PG_EFORMAT && !value);
  free(deep);
}

TEST(files_are_loaded) {
  json_t *value;
  put_file(temporary_path("x.json"), "{\"a\":\n 1,}", 10);
  CHECK(pg__json_load(ctx, temporary_path("x.json"), 0, &value) == PG_EFORMAT && !value);
  CHECK(strstr(pg_context_message(ctx), "/x.json', line 2"), "%s", pg_context_message(ctx));
  put_file(temporary_path("x.json"), "{\"a\":1}", 7);
  CHECK(pg__json_load(ctx, temporary_path("x.json"), 7, &value) == 0);
  json_decref(value);
  CHECK(pg__json_load(ctx, temporary_path("x.json"), 6, &value) == PG_EFORMAT);
  CHECK(pg__json_load(ctx, temporary_path("none"), 0, &value) == PG_ENOENT);
}

static void check_print(json_t *value, int indent, const char *want) {
  char *got = pg__json_print(value, indent);
  CHECK(got && strcmp(got, want) == 0, "%s, want %s", got, want);
  free(got);
}

TEST(printing) {
  json_t *value;
  CHECK(parse("{\"z\":1,\"a\":[0.1,3.0,-0.0,1e300,{}],\"e\":[],\"t\":[true,false,null]}", &value) ==
        0);
  check_print(
      value, 0,
      "{\"z\": 1, \"a\": [0.1, 3.0, -0.0, 1e300, {}], \"e\": [], \"t\": [true, false, null]}");
  json_decref(value);
  CHECK(parse("{\"z\":{\"y\":1},\"a\":[1,2],\"b\":[[1],[]]}", &value) == 0);
  check_print(value, 2,
              "{\n  \"z\": {\n    \"y\": 1\n  },\n  \"a\": [1, 2],\n"
              "  \"b\": [\n    [1],\n    []\n  ]\n}");
  json_decref(value);
  value = json_string("q\" b\\ n\n t\t \x01 \u20ac /");
  check_print(value, 0, "\"q\\\" b\\\\ n\\n t\\t \\u0001 \u20ac /\"");
  json_decref(value);
  /* What is printed reads back equal. */
  CHECK(parse("[\"\\u0000\"]", &value) == PG_EFORMAT);
  CHECK(parse("{\"k\\n\\\"\": [1.5e-300, -9223372036854775808, \"\\u001f\\ud83d\\ude00\"]}",
              &value) == 0);
  char *text = pg__json_print(value, 3);
  json_t *again = NULL;
  CHECK(text && parse(text, &again) == 0 && json_equal(value, again), "%s", text);
  json_decref(again);
  json_decref(value);
  free(text);
  /* A value that contains itself ends. */
  value = json_array();
  json_array_append(value, json_null());
  json_t *outer = value;
  for (int i = 0; i < 1500; i++) {
    json_t *wrap = json_array();
    json_array_append_new(wrap, outer);
    outer = wrap;
  }
  CHECK(pg__json_print(outer, 0) == NULL);
  json_decref(outer);
}

TEST(a_decimal_comma_changes_nothing) {
  char out[32], host[32];
  json_t *value;
  const int have = comma_locale();
  CHECK(have, "no locale with a decimal comma could be had");
  snprintf(host, sizeof host, "%.1f", 0.5);
  CHECK(strcmp(host, "0,5") == 0, "the test's own premise: %s", host);
  pg_format_real(0.1, out);
  CHECK(strcmp(out, "0.1") == 0, "%s", out);
  pg_format_real(-1.25e-7, out);
  CHECK(strcmp(out, "-1.25e-7") == 0, "%s", out);
  CHECK(parse("[0.5, 1.25e3]", &value) == 0, "%s", pg_context_message(ctx));
  CHECK(json_real_value(json_array_get(value, 0)) == 0.5);
  check_print(value, 0, "[0.5, 1250.0]");
  json_decref(value);
  CHECK(parse("[0,5]", &value) == 0 && json_array_size(value) == 2);
  json_decref(value);
  snprintf(host, sizeof host, "%.1f", 0.5);
  CHECK(strcmp(host, "0,5") == 0, "the host's locale is as it was: %s", host);
  setlocale(LC_NUMERIC, "C");
}

int main(void) {
  const pg_context_options options = {.threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(chosen_reals);
  RUN(random_reals_round_trip_and_are_shortest);
  RUN(parsing);
  RUN(nesting_is_limited);
  RUN(files_are_loaded);
  RUN(printing);
  RUN(a_decimal_comma_changes_nothing);
  if (pg_file_remove_tree(ctx, temporary_folder) < 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
