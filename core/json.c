/* JSON: jansson parses; numbers and texts are printed here, since jansson prints reals with all 17
 * digits. Both happen under the "C" locale of this thread, whatever the host program has set. */
#include "json.h"
#include "files.h"
#include "internal.h"

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* glibc's "C" locale is static: this neither allocates nor fails. Where it does fail, uselocale(0)
 * changes nothing. */
static locale_t c_locale_begin(locale_t *made) {
  *made = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  return uselocale(*made);
}
static void c_locale_end(locale_t made, locale_t saved) {
  uselocale(saved);
  if (made) freelocale(made);
}

/* ---- parsing --------------------------------------------------------------------------- */
/* jansson recurses, so nesting is counted before it starts. */
static int check_depth(pg_context *ctx, const char *text, size_t size, const char *what) {
  int depth = 0, line = 1;
  size_t line_start = 0;
  bool string = false;
  for (size_t i = 0; i < size; i++) {
    const char c = text[i];
    if (c == '\n') {
      line++;
      line_start = i + 1;
    }
    if (string) {
      if (c == '\\')
        i++;
      else if (c == '"')
        string = false;
    } else if (c == '"') {
      string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > PG_JSON_DEPTH)
        return pg_fail(ctx, PG_EFORMAT, "%s, line %d, column %zu: nested deeper than %d", what,
                       line, i - line_start + 1, PG_JSON_DEPTH);
    } else if (c == ']' || c == '}') {
      depth--;
    }
  }
  return 0;
}

static int parse(pg_context *ctx, const char *text, size_t size, const char *what, size_t flags,
                 json_t **out) {
  json_error_t error;
  locale_t made;
  *out = NULL;
  const int status = check_depth(ctx, text, size, what);
  if (status < 0) return status;
  const locale_t saved = c_locale_begin(&made);
  *out = json_loadb(text, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | flags, &error);
  c_locale_end(made, saved);
  if (*out) return 0;
  if (json_error_code(&error) == json_error_out_of_memory)
    return pg_fail(ctx, PG_ENOMEM, "%s does not fit in memory", what);
  return pg_fail(ctx, PG_EFORMAT, "%s, line %d, column %d: %s", what, error.line, error.column,
                 error.text);
}

int pg__json_parse(pg_context *ctx, const char *text, size_t size, const char *what, json_t **out) {
  return parse(ctx, text, size, what, 0, out);
}

int pg__json_parse_text(pg_context *ctx, const char *text, size_t size, const char *what,
                        json_t **out) {
  return parse(ctx, text, size, what, JSON_ALLOW_NUL, out);
}

int pg__json_load(pg_context *ctx, const char *path, int64_t limit, json_t **out) {
  char *text, what[600];
  size_t size;
  *out = NULL;
  int status = pg_file_read(ctx, path, limit, &text, &size);
  if (status < 0) return status;
  snprintf(what, sizeof what, "'%.590s'", path);
  status = pg__json_parse(ctx, text, size, what, out);
  free(text);
  return status;
}

int pg__json_count(pg_context *ctx, const char *what, const json_t *object, const char *key,
                   int64_t *out) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_integer(value) || json_integer_value(value) < 0 ||
      json_integer_value(value) > (json_int_t)1 << 53)
    return pg_fail(ctx, PG_EFORMAT, "%s: \"%s\" must be an integer from 0 to 2^53", what, key);
  *out = json_integer_value(value);
  return 0;
}

/* ---- numbers --------------------------------------------------------------------------- */
/* "D.DDDe±X" with `digits` significant digits; true when it reads back as x. With `up` the last
 * digit is one larger than the nearest decimal has (false when that would carry). */
static bool scientific(double x, int digits, bool up, char out[32]) {
  snprintf(out, 32, "%.*e", digits - 1, x);
  if (up) {
    char *last = strchr(out, 'e') - 1;
    if (*last < '0' || *last > '8') return false;
    ++*last;
  }
  return strtod(out, NULL) == x;
}

/* The fewest digits that read back as x. Up to 15 digits the nearest decimal suffices: if any of
 * so few digits reads back as a normal x, then x printed with 15 digits gives it back, zeros
 * appended. At a power of two the doubles below lie twice as close as those above, so a decimal
 * above x may read back where the nearest one, below x, does not. */
static void shortest(double x, char out[32]) {
  int exponent;
  const bool power = frexp(x, &exponent) == 0.5;
  const int from = fabs(x) < DBL_MIN ? 1 : 15;
  for (int digits = from; digits < 17; digits++) {
    if (scientific(x, digits, false, out)) return;
    if (power && scientific(x, digits, true, out)) return;
  }
  scientific(x, 17, false, out);
}

void pg_format_real(double x, char out[32]) {
  char text[32], digits[20];
  locale_t made;
  if (!isfinite(x)) {
    memcpy(out, "null", 5);
    return;
  }
  if (x == 0) {
    memcpy(out, signbit(x) ? "-0.0" : "0.0", signbit(x) ? 5 : 4);
    return;
  }
  const locale_t saved = c_locale_begin(&made);
  shortest(fabs(x), text);
  c_locale_end(made, saved);
  /* Significant digits without trailing zeros, and the power of ten of the first. */
  int n = 0;
  const char *p = text;
  for (; *p != 'e'; p++)
    if (*p != '.') digits[n++] = *p;
  const int power = atoi(p + 1);
  while (n > 1 && digits[n - 1] == '0') n--;
  char *o = out;
  if (x < 0) *o++ = '-';
  if (power >= -4 && power < 16) { /* plain: at most 5 zeros or 17 digits before the end */
    if (power < 0) {
      *o++ = '0', *o++ = '.';
      for (int i = -1; i > power; i--) *o++ = '0';
    }
    for (int i = 0; i < n || i <= power; i++) {
      *o++ = i < n ? digits[i] : '0';
      if (i == power) *o++ = '.';
    }
    if (o[-1] == '.') *o++ = '0';
    *o = 0;
  } else {
    *o++ = digits[0];
    if (n > 1) *o++ = '.';
    for (int i = 1; i < n; i++) *o++ = digits[i];
    snprintf(o, (size_t)(out + 32 - o), "e%d", power);
  }
}

/* ---- printing -------------------------------------------------------------------------- */
typedef struct text {
  char *data;
  size_t used, size;
  bool failed;
} text;

static void put(text *t, const char *data, size_t size) {
  if (t->failed) return;
  if (size >= t->size - t->used) {
    size_t larger = t->size;
    while (size >= larger - t->used) larger = larger ? 2 * larger : 256;
    char *data_new = realloc(t->data, larger);
    if (!data_new) {
      t->failed = true;
      return;
    }
    t->data = data_new;
    t->size = larger;
  }
  memcpy(t->data + t->used, data, size);
  t->used += size;
  t->data[t->used] = 0;
}

static void put_string(text *t, const char *s, size_t size) {
  put(t, "\"", 1);
  size_t start = 0;
  for (size_t i = 0; i < size; i++) {
    const unsigned char c = (unsigned char)s[i];
    char escape[8];
    const char *named = c == '"'    ? "\\\""
                        : c == '\\' ? "\\\\"
                        : c == '\n' ? "\\n"
                        : c == '\t' ? "\\t"
                        : c == '\r' ? "\\r"
                                    : NULL;
    if (c >= 0x20 && !named) continue;
    put(t, s + start, i - start);
    if (!named) snprintf(escape, sizeof escape, "\\u%04x", c);
    put(t, named ? named : escape, strlen(named ? named : escape));
    start = i + 1;
  }
  put(t, s + start, size - start);
  put(t, "\"", 1);
}

static void new_line(text *t, int indent, int depth) {
  if (indent <= 0) return;
  put(t, "\n", 1);
  for (int i = 0; i < indent * depth; i++) put(t, " ", 1);
}

/* Far more than PG_JSON_DEPTH, which binds what is read; this only stops a value that contains
 * itself. */
#define PRINT_DEPTH 1000

static void put_value(text *t, const json_t *value, int indent, int depth) {
  char number[32];
  if (depth > PRINT_DEPTH) t->failed = true;
  if (t->failed) return;
  switch (json_typeof(value)) {
  case JSON_OBJECT: {
    json_t *object = (json_t *)value, *item; /* jansson's iterators take no const */
    const char *key;
    bool first = true;
    put(t, "{", 1);
    json_object_foreach(object, key, item) {
      if (!first) put(t, indent > 0 ? "," : ", ", indent > 0 ? 1 : 2);
      first = false;
      new_line(t, indent, depth + 1);
      put_string(t, key, strlen(key));
      put(t, ": ", 2);
      put_value(t, item, indent, depth + 1);
    }
    if (!first) new_line(t, indent, depth);
    put(t, "}", 1);
    break;
  }
  case JSON_ARRAY: {
    /* An array of plain values stays on one line. */
    int inner = 0;
    for (size_t i = 0; i < json_array_size(value); i++) {
      const json_t *item = json_array_get(value, i);
      if (json_is_array(item) || json_is_object(item)) inner = indent;
    }
    put(t, "[", 1);
    for (size_t i = 0; i < json_array_size(value); i++) {
      if (i) put(t, inner > 0 ? "," : ", ", inner > 0 ? 1 : 2);
      new_line(t, inner, depth + 1);
      put_value(t, json_array_get(value, i), indent, depth + 1);
    }
    new_line(t, inner, depth);
    put(t, "]", 1);
    break;
  }
  case JSON_STRING: put_string(t, json_string_value(value), json_string_length(value)); break;
  case JSON_INTEGER:
    snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
    put(t, number, strlen(number));
    break;
  case JSON_REAL:
    pg_format_real(json_real_value(value), number);
    put(t, number, strlen(number));
    break;
  case JSON_TRUE: put(t, "true", 4); break;
  case JSON_FALSE: put(t, "false", 5); break;
  case JSON_NULL: put(t, "null", 4); break;
  }
}

char *pg__json_print(const json_t *value, int indent) {
  text t = {0};
  put_value(&t, value, indent, 0);
  if (!t.failed) return t.data;
  free(t.data);
  return NULL;
}
