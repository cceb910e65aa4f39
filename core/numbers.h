/* Numbers as files hold them, converted to what tensors hold: floats to fp32, integers to 32 bits.
 * Shared by the readers of safetensors and .npy. */
#ifndef PG_NUMBERS_H
#define PG_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum pg__number {
  PG__NONE,
  PG__F16,
  PG__BF16,
  PG__F32,
  PG__F64,
  PG__BOOL,
  PG__I8,
  PG__U8,
  PG__I16,
  PG__U16,
  PG__I32,
  PG__U32,
  PG__I64,
  PG__U64
} pg__number;

/* By safetensors' name; PG__NONE for a type that is not read. */
pg__number pg__number_named(const char *name);
int pg__number_bytes(pg__number type);
bool pg__number_is_integer(pg__number type); /* booleans too, as 0 and 1 */
/* n floats to fp32, each rounded once. */
void pg__numbers_f32(pg__number type, const void *from, int64_t n, float *out);
/* n integers; returns the index of the first one outside 32 bits and gives it as *bad (of PG__U64
 * the bits), or -1. */
int64_t pg__numbers_i32(pg__number type, const void *from, int64_t n, int32_t *out, int64_t *bad);

#endif
