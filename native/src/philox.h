/* philox.h - Philox4x32-10, the counter-based random number generator (Salmon et al. 2011, section
 * 3.3). */
#ifndef GC_PHILOX_H
#define GC_PHILOX_H

#include "internal.h"

enum { GC_PHILOX_ROUNDS = 10 };
#define GC_PHILOX_M0 0xD2511F53u /* multipliers: chosen by the authors for the best avalanche */
#define GC_PHILOX_M1 0xCD9E8D57u
#define GC_PHILOX_W0 0x9E3779B9u /* Weyl increments of the key: golden ratio and sqrt(3) - 1 */
#define GC_PHILOX_W1 0xBB67AE85u

/* Bit of the counter's stream word that marks the draws deciding ties. */
#define GC_DEEP_STREAM 0x80000000u

GC_INLINE void gc_philox(uint32_t c[4], uint32_t k0, uint32_t k1)
{
    for (int round = 0; round < GC_PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)GC_PHILOX_M0 * c[0], p1 = (uint64_t)GC_PHILOX_M1 * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c[3] = (uint32_t)p0;
        k0 += GC_PHILOX_W0;
        k1 += GC_PHILOX_W1;
    }
}

#endif
