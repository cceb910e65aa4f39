/* Names and meanings of the error codes, from the one list in error.h. */
#include "error.h"

#define PG_ERROR_NAME(name, value, text, meaning)                                                  \
  case name:                                                                                       \
    return text;                                                                                   \
#define PG_ERROR_MEANING(name, value, text, meaning) case name : return meaning;

const char *pg_error_name(int code) {
  switch (code) {
    PG_ERRORS(PG_ERROR_NAME)
  case PG_OK: return "OK";
  default: return "EUNKNOWN";
  }
}

const char *pg_error_meaning(int code) {
  switch (code) {
    PG_ERRORS(PG_ERROR_MEANING)
  case PG_OK: return "no error";
  default: return "an unknown error";
  }
}
