/* Philox 4x32-10 (Salmon et al. 2011): four 32-bit words of counter (index, stream) under key seed,
 * a pure function, alike on every device. */
#ifndef PG_PHILOX_H
#define PG_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define PG_PHILOX __host__ __device__ static inline
#else
#define PG_PHILOX static inline
#endif

/* Ten rounds of two 32x32 -> 64-bit products; constants from Salmon et al. 2011, table 2. */
PG_PHILOX void pg_philox_words(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4]) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32);
  uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = (uint64_t)0xD2511F53 * c0, p1 = (uint64_t)0xCD9E8D57 * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9; /* golden ratio */
    k1 += 0xBB67AE85; /* sqrt(3) - 1 */
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

#endif
