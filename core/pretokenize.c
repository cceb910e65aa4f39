/* GPT-2's pre-tokenisation: contractions, words, numbers, other runs, white space.
 *
 * The pattern is PG_GPT2_PATTERN with one change: PCRE2's \s has U+180E, which Unicode no longer
 * counts as white space, so the class is spelled out. Texts are bytes. Each maximal run of valid
 * UTF-8 is divided as if it stood alone, and each maximal run of other bytes is one piece; for
 * valid UTF-8 the pieces are those of other implementations. */
#include "internal.h"
#include "tokenizer_internal.h"
#include <string.h>

#define SPACE "\\t-\\r\\x{85}\\p{Z}"
static const char pattern[] = "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE
                              "\\p{L}\\p{N}]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+";

static int library_error(pg_context *ctx, int code, const char *what) {
  PCRE2_UCHAR text[128];
  if (code == PCRE2_ERROR_NOMEMORY || code == PCRE2_ERROR_HEAPLIMIT)
    return pg_fail(ctx, PG_ENOMEM, "no memory for %s", what);
  pcre2_get_error_message(code, text, sizeof text);
  return pg_fail(ctx, PG_EUNSUPPORTED, "%s failed in PCRE2: %s", what, (const char *)text);
}

int pg__pretokenizer_init(pg_context *ctx, pg__pretokenizer *p) {
  int code;
  PCRE2_SIZE offset;
  *p = (pg__pretokenizer){.context = ctx};
  p->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_START_OPTIMIZE, &code,
                          &offset, NULL);
  if (!p->code) return library_error(ctx, code, "pre-tokenisation");
  p->match = pcre2_match_data_create(1, NULL);
  if (!p->match) {
    pg__pretokenizer_free(p);
    return pg_fail(ctx, PG_ENOMEM, "no memory for pre-tokenisation");
  }
  p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0;
  return 0;
}

void pg__pretokenizer_free(pg__pretokenizer *p) {
  pcre2_match_data_free(p->match);
  pcre2_code_free(p->code);
  p->match = NULL;
  p->code = NULL;
}

/* Bytes of the well-formed character at s, 0 when there is none (Unicode, table 3-7). */
static size_t character(const unsigned char *s, size_t size) {
  unsigned char c = s[0], low = 0x80, high = 0xbf;
  size_t n;
  if (c < 0x80) return 1;
  if (c >= 0xc2 && c <= 0xdf) {
    n = 2;
  } else if (c >= 0xe0 && c <= 0xef) {
    n = 3;
    if (c == 0xe0) low = 0xa0;
    if (c == 0xed) high = 0x9f;
  } else if (c >= 0xf0 && c <= 0xf4) {
    n = 4;
    if (c == 0xf0) low = 0x90;
    if (c == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (size < n || s[1] < low || s[1] > high) return 0;
  for (size_t i = 2; i < n; i++)
    if ((s[i] & 0xc0) != 0x80) return 0;
  return n;
}

size_t pg__utf8_prefix(const char *text, size_t size) {
  const unsigned char *s = (const unsigned char *)text;
  size_t i = 0;
  while (i < size) {
    uint64_t word;
    while (size - i >= 8 && (memcpy(&word, s + i, 8), (word & 0x8080808080808080u) == 0)) i += 8;
    if (i == size) break;
    size_t n = character(s + i, size - i);
    if (n == 0) break;
    i += n;
  }
  return i;
}

int pg__pieces_next(pg__pieces *walk, const char **piece, size_t *size) {
  if (walk->at == walk->size) return 0;
  const unsigned char *s = (const unsigned char *)walk->text;
  *piece = walk->text + walk->at;
  if (walk->at == walk->run_end) {
    walk->run_end += pg__utf8_prefix(walk->text + walk->at, walk->size - walk->at);
    if (walk->run_end == walk->at) {
      size_t end = walk->at + 1;
      while (end < walk->size && character(s + end, walk->size - end) == 0) end++;
      *size = end - walk->at;
      walk->at = walk->run_end = end;
      return 1;
    }
  }
  pg__pretokenizer *p = walk->pretokenizer;
  size_t left = walk->run_end - walk->at;
  int code = p->jit ? pcre2_jit_match(p->code, (PCRE2_SPTR)*piece, left, 0, 0, p->match, NULL)
                    : pcre2_match(p->code, (PCRE2_SPTR)*piece, left, 0, PCRE2_NO_UTF_CHECK,
                                  p->match, NULL);
  if (code < 0) return library_error(p->context, code, "pre-tokenisation");
  *size = pcre2_get_ovector_pointer(p->match)[1];
  walk->at += *size;
  return 1;
}

/* Does a white space character end at text[end - 1]? */
static bool space_before(const unsigned char *s, size_t end) {
  unsigned char c = s[end - 1];
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  size_t start = end - 1;
  while (start > 0 && end - start < 4 && (s[start] & 0xc0) == 0x80) start--;
  if (character(s + start, end - start) != end - start) return false;
  if (end - start == 2) return s[start] == 0xc2 && (s[start + 1] == 0x85 || s[start + 1] == 0xa0);
  if (end - start != 3) return false;
  uint32_t point = (s[start] & 0x0fu) << 12 | (s[start + 1] & 0x3fu) << 6 | (s[start + 2] & 0x3fu);
  return point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
         point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000;
}

size_t pg__safe_cut(const char *text, size_t size) {
  const unsigned char *s = (const unsigned char *)text;
  for (size_t i = size; i-- > 1;)
    if ((s[i] == ' ' || s[i] == '\n') && !space_before(s, i)) return i;
  return 0;
}
