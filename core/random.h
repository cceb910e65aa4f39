/* Random numbers, all exactly reproducible on any machine.
 *
 * Two generators, for two purposes:
 *  - Philox 4x32-10 (Salmon et al. 2011), counter-based: draw number i of stream (seed, stream) is
 *    a pure function, so initial weights do not depend on the order or the sizes of other draws.
 *  - NumPy's SeedSequence + PCG64 + Generator.shuffle, for the data order of the published runs. */
#ifndef PG_RANDOM_H
#define PG_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Four 32-bit words of counter (index, stream) under key seed. */
void pg_philox(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4]);
/* out[i] for i < n: standard normals number first+i of (seed, stream): Box-Muller in fp64 on pairs
 * of 32-bit uniforms ((u + 0.5) / 2^32), rounded to fp32. */
void pg_normals(uint64_t seed, uint64_t stream, uint64_t first, size_t n, float *out);
/* FNV-1a 64 of a name: the stream of a parameter is the hash of its Hugging Face name. */
uint64_t pg_hash_name(const char *name);

typedef struct pg_pcg64 {
  uint64_t state_high, state_low, increment_high, increment_low;
  uint32_t stored; /* high half kept by the last 32-bit draw */
  int has_stored;
} pg_pcg64;

/* PCG64(SeedSequence(entropy)) with `count` entropy integers (each split into 32-bit words). */
void pg_pcg64_seed(pg_pcg64 *rng, const uint64_t *entropy, size_t count);
/* The SeedSequence's first eight 32-bit words, for tests. */
void pg_seed_sequence(const uint64_t *entropy, size_t count, uint32_t out[8]);
uint64_t pg_pcg64_next64(pg_pcg64 *rng);
uint32_t pg_pcg64_next32(pg_pcg64 *rng);
/* Generator(rng).shuffle(arange(n)) into order[n]; n < 2^32. */
void pg_shuffle(pg_pcg64 *rng, int64_t *order, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
