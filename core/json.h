/* JSON through jansson, with the project's rules: duplicate keys refused, nesting limited, numbers
 * printed in the shortest form that reads back equal, always with a dot, whatever the locale. */
#ifndef PG_JSON_H
#define PG_JSON_H

#include "context.h"
#include <jansson.h>

#define PG_JSON_DEPTH 64

/* PG_EFORMAT with `what`, line and column. *out is a new reference. pg__json_parse and
 * pg__json_load refuse \u0000, so that a string is all of what json_string_value says;
 * pg__json_parse_text takes it where texts are data (their length is json_string_length). */
int pg__json_parse_text(pg_context *ctx, const char *text, size_t size, const char *what,
                        json_t **out);
int pg__json_parse(pg_context *ctx, const char *text, size_t size, const char *what, json_t **out);
int pg__json_load(pg_context *ctx, const char *path, int64_t limit, json_t **out);
/* The whole number from 0 to 2^53 (what any writer of JSON keeps) under `key`; PG_EFORMAT with
 * `what` and the key otherwise. */
int pg__json_count(pg_context *ctx, const char *what, const json_t *object, const char *key,
                   int64_t *out);
/* Shortest decimal that reads back as x: "0.1", "1e-10", "3.0" (a real keeps its dot or exponent);
 * non-finite gives "null". At most 32 bytes. */
void pg_format_real(double x, char out[32]);
/* malloc'ed text; indent 0: one line. Key order is kept. NULL when out of memory. */
char *pg__json_print(const json_t *value, int indent);

#endif
