/* Philox 4x32-10 and normals from it; NumPy's SeedSequence, PCG64 and shuffle. */
#include "random.h"
#include "../kernels/philox.h"

#include <math.h>

/* ---- Philox ---------------------------------------------------------------------------- */
void pg_philox(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4]) {
  pg_philox_words(seed, stream, index, out);
}

/* Normals 4*block ... 4*block+3 of the stream. */
static void normal_block(uint64_t seed, uint64_t stream, uint64_t block, float out[4]) {
  uint32_t words[4];
  pg_philox(seed, stream, block, words);
  for (int pair = 0; pair < 2; pair++) {
    const double u = (words[2 * pair] + 0.5) * 0x1p-32;
    const double angle = 2 * 3.14159265358979323846 * ((words[2 * pair + 1] + 0.5) * 0x1p-32);
    const double radius = sqrt(-2 * log(u));
    out[2 * pair] = (float)(radius * cos(angle));
    out[2 * pair + 1] = (float)(radius * sin(angle));
  }
}

void pg_normals(uint64_t seed, uint64_t stream, uint64_t first, size_t n, float *out) {
  if (n == 0) return;
  const uint64_t first_block = first / 4, blocks = (first + n - 1) / 4 - first_block + 1;
#pragma omp parallel for schedule(static) if (n >= 65536)
  for (uint64_t b = 0; b < blocks; b++) {
    float values[4];
    normal_block(seed, stream, first_block + b, values);
    for (uint64_t j = 0; j < 4; j++) {
      const uint64_t at = (first_block + b) * 4 + j;
      if (at >= first && at - first < n) out[at - first] = values[j];
    }
  }
}

uint64_t pg_hash_name(const char *name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001b3;
  return hash;
}

/* ---- NumPy's SeedSequence -------------------------------------------------------------- */
#define POOL 4

/* The k-th 32-bit word of the entropy integers, each in as many words as it needs, low first, 0 in
 * one. *count receives the number of words. */
static uint32_t entropy_word(const uint64_t *entropy, size_t integers, size_t k, size_t *count) {
  uint32_t word = 0;
  size_t n = 0;
  for (size_t i = 0; i < integers; i++) {
    if (n++ == k) word = (uint32_t)entropy[i];
    if (entropy[i] >> 32 && n++ == k) word = (uint32_t)(entropy[i] >> 32);
  }
  *count = n;
  return word;
}

static uint32_t hash_mix(uint32_t value, uint32_t *constant) {
  value ^= *constant;
  *constant *= 0x931e8875;
  value *= *constant;
  return value ^ value >> 16;
}

static uint32_t mix(uint32_t x, uint32_t y) {
  const uint32_t r = 0xca01f9dd * x - 0x4973f715 * y;
  return r ^ r >> 16;
}

void pg_seed_sequence(const uint64_t *entropy, size_t count, uint32_t out[8]) {
  uint32_t pool[POOL], constant = 0x43b0d7e5;
  size_t words;
  for (size_t i = 0; i < POOL; i++)
    pool[i] = hash_mix(entropy_word(entropy, count, i, &words), &constant);
  for (size_t from = 0; from < POOL; from++)
    for (size_t to = 0; to < POOL; to++)
      if (from != to) pool[to] = mix(pool[to], hash_mix(pool[from], &constant));
  for (size_t i = POOL; i < words; i++) {
    const uint32_t word = entropy_word(entropy, count, i, &words);
    for (size_t to = 0; to < POOL; to++) pool[to] = mix(pool[to], hash_mix(word, &constant));
  }
  constant = 0x8b51f9dd;
  for (size_t i = 0; i < 8; i++) {
    uint32_t value = pool[i % POOL] ^ constant;
    constant *= 0x58f38ded;
    value *= constant;
    out[i] = value ^ value >> 16;
  }
}

/* ---- PCG64 (XSL-RR 128/64, step first) ------------------------------------------------- */
typedef unsigned __int128 u128;

static u128 join(uint64_t high, uint64_t low) {
  return (u128)high << 64 | low;
}

static u128 step(pg_pcg64 *rng) {
  const u128 state =
      join(rng->state_high, rng->state_low) * join(0x2360ED051FC65DA4, 0x4385DF649FCCF645) +
      join(rng->increment_high, rng->increment_low);
  rng->state_high = (uint64_t)(state >> 64);
  rng->state_low = (uint64_t)state;
  return state;
}

void pg_pcg64_seed(pg_pcg64 *rng, const uint64_t *entropy, size_t count) {
  uint32_t words[8];
  uint64_t a[4];
  pg_seed_sequence(entropy, count, words);
  for (int i = 0; i < 4; i++) a[i] = words[2 * i] | (uint64_t)words[2 * i + 1] << 32;
  const u128 increment = join(a[2], a[3]) << 1 | 1;
  *rng = (pg_pcg64){.increment_high = (uint64_t)(increment >> 64),
                    .increment_low = (uint64_t)increment};
  const u128 state = step(rng) + join(a[0], a[1]);
  rng->state_high = (uint64_t)(state >> 64);
  rng->state_low = (uint64_t)state;
  step(rng);
}

uint64_t pg_pcg64_next64(pg_pcg64 *rng) {
  const u128 state = step(rng);
  const uint64_t x = (uint64_t)(state >> 64) ^ (uint64_t)state;
  const unsigned turn = (unsigned)(state >> 122);
  return x >> turn | x << (-turn & 63);
}

uint32_t pg_pcg64_next32(pg_pcg64 *rng) {
  if (rng->has_stored) {
    rng->has_stored = 0;
    return rng->stored;
  }
  const uint64_t x = pg_pcg64_next64(rng);
  rng->stored = (uint32_t)(x >> 32);
  rng->has_stored = 1;
  return (uint32_t)x;
}

/* Fisher-Yates from the end; the index comes by masking and rejecting, as NumPy's shuffle does. */
void pg_shuffle(pg_pcg64 *rng, int64_t *order, int64_t n) {
  for (int64_t i = 0; i < n; i++) order[i] = i;
  for (int64_t i = n - 1; i > 0; i--) {
    const uint32_t mask = UINT32_MAX >> __builtin_clz((uint32_t)i);
    uint32_t j;
    do j = pg_pcg64_next32(rng) & mask;
    while (j > (uint32_t)i);
    const int64_t swap = order[i];
    order[i] = order[j];
    order[j] = swap;
  }
}
