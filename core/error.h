/* Errors of the Perigee core.
 *
 * A fallible function returns 0 or one of the negative codes below; results come through pointers
 * and a sentence for people is left in the context (pg_context_message). The core never prints,
 * exits or longjmps.  One list gives the enum, the name and the general meaning. */
#ifndef PG_ERROR_H
#define PG_ERROR_H

#define PG_ERRORS(X)                                                                               \
  X(PG_EINVAL, -1, "EINVAL", "an argument is not allowed")                                         \
  X(PG_ENOMEM, -2, "ENOMEM", "out of memory")                                                      \
  X(PG_EIO, -3, "EIO", "reading or writing failed")                                                \
  X(PG_EFORMAT, -4, "EFORMAT", "a file does not have the expected format")                         \
  X(PG_ENOENT, -5, "ENOENT", "something named does not exist")                                     \
  X(PG_EEXIST, -6, "EEXIST", "something exists already")                                           \
  X(PG_ENOSPC, -7, "ENOSPC", "too little free space")                                              \
  X(PG_EDATA, -8, "EDATA", "the training data does not fit the run")                               \
  X(PG_ENONFINITE, -9, "ENONFINITE", "a number is not finite")                                     \
  X(PG_ECANCELED, -10, "ECANCELED", "the operation was cancelled")                                 \
  X(PG_EDEVICE, -11, "EDEVICE", "the device failed or is missing")                                 \
  X(PG_EUNSUPPORTED, -12, "EUNSUPPORTED", "not supported here")                                    \
  X(PG_ESTATE, -13, "ESTATE", "the object is not in a state that allows this")                     \
  X(PG_EHOST, -14, "EHOST", "a callback of the host program failed")                               \
  X(PG_EPEER, -15, "EPEER", "another rank of the run failed or did not come")

#define PG_ERROR_ENUM(name, value, text, meaning) name = value,
enum pg_error { PG_OK = 0, PG_ERRORS(PG_ERROR_ENUM) PG_ERROR_LAST_ = -16 };
#undef PG_ERROR_ENUM

#ifdef __cplusplus
extern "C" {
#endif

/* "EINVAL" for PG_EINVAL; "OK" for 0; "EUNKNOWN" for anything else. */
const char *pg_error_name(int code);
/* The general meaning, for a message when no detail exists. */
const char *pg_error_meaning(int code);

#ifdef __cplusplus
}
#endif
#endif
