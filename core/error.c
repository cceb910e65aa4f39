/* Names and meanings of the error codes, from the one list in error.h. */
#include "error.h"

#include <stddef.h>

#define PG_ERROR_NAME(name, value, text, meaning) {name, text, meaning},
static const struct {
  int code;
  const char *name, *meaning;
} errors[] = {{PG_OK, "OK", "no error"}, PG_ERRORS(PG_ERROR_NAME)};

const char *pg_error_name(int code) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].code == code) return errors[i].name;
  return "EUNKNOWN";
}

const char *pg_error_meaning(int code) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].code == code) return errors[i].meaning;
  return "an unknown error";
}
