#include "numbers.h"

#include <string.h>

static const struct {
  const char *name;
  int bytes;
} types[] = {
    [PG__NONE] = {"", 0},   [PG__F16] = {"F16", 2}, [PG__BF16] = {"BF16", 2},
    [PG__F32] = {"F32", 4}, [PG__F64] = {"F64", 8}, [PG__BOOL] = {"BOOL", 1},
    [PG__I8] = {"I8", 1},   [PG__U8] = {"U8", 1},   [PG__I16] = {"I16", 2},
    [PG__U16] = {"U16", 2}, [PG__I32] = {"I32", 4}, [PG__U32] = {"U32", 4},
    [PG__I64] = {"I64", 8}, [PG__U64] = {"U64", 8},
};

pg__number pg__number_named(const char *name) {
  for (int i = PG__NONE + 1; i <= PG__U64; i++)
    if (strcmp(types[i].name, name) == 0) return (pg__number)i;
  return PG__NONE;
}

int pg__number_bytes(pg__number type) {
  return types[type].bytes;
}

bool pg__number_is_integer(pg__number type) {
  return type >= PG__BOOL;
}

static float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* IEEE half: 1 sign, 5 exponent (bias 15), 10 fraction bits. Every half is an fp32 number. */
static float from_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, fraction = half & 0x3ff;
  const uint32_t exponent = half >> 10 & 31;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = (float)fraction * 0x1p-24f;
  return sign ? -small : small;
}

void pg__numbers_f32(pg__number type, const void *from, int64_t n, float *out) {
  const uint16_t *half = from;
  const double *wide = from;
  switch (type) {
  case PG__F16:
    for (int64_t i = 0; i < n; i++) out[i] = from_half(half[i]);
    break;
  case PG__BF16:
    for (int64_t i = 0; i < n; i++) out[i] = from_bits((uint32_t)half[i] << 16);
    break;
  case PG__F64:
    for (int64_t i = 0; i < n; i++) out[i] = (float)wide[i];
    break;
  default: memcpy(out, from, (size_t)n * sizeof *out);
  }
}

int64_t pg__numbers_i32(pg__number type, const void *from, int64_t n, int32_t *out, int64_t *bad) {
  for (int64_t i = 0; i < n; i++) {
    int64_t x = 0;
    switch (type) {
    case PG__BOOL: x = ((const uint8_t *)from)[i] != 0; break;
    case PG__I8: x = ((const int8_t *)from)[i]; break;
    case PG__U8: x = ((const uint8_t *)from)[i]; break;
    case PG__I16: x = ((const int16_t *)from)[i]; break;
    case PG__U16: x = ((const uint16_t *)from)[i]; break;
    case PG__I32: x = ((const int32_t *)from)[i]; break;
    case PG__U32: x = ((const uint32_t *)from)[i]; break;
    default: x = ((const int64_t *)from)[i];
    }
    /* A number of 64 bits without sign is too large whenever it reads as negative. */
    if (x > INT32_MAX || x < INT32_MIN || (type == PG__U64 && x < 0)) {
      *bad = x;
      return i;
    }
    out[i] = (int32_t)x;
  }
  return -1;
}
