/* superblocks.h - what the vector tiers' ternary encoders share: superblocks of 64 elements, which
 * eight Philox blocks serve, the constants of their rounds, and which superblocks a kernel may
 * take.
 */
#ifndef GC_SUPERBLOCKS_H
#define GC_SUPERBLOCKS_H

#include "numeric.h"
#include "philox.h"

/* GC_OPEN_DISTANCE: the contract compares a draw r with T and looks deeper when they are equal.
 * Vector code knows T + 1, at most 65535, within one, so that u = T + 1 - r > 2 means r < T for
 * sure, and u < 0 (a large number without sign) r > T. What is left is open. */
enum { GC_SUPERBLOCK_NUMEL = 64, GC_OPEN_DISTANCE = 2 };

/* Philox with what is constant worked out: three of four counter words are, so the first two rounds
 * need one product each, and the third round one exclusive or less. */
typedef struct {
    uint32_t round1_c2; /* c3 ^ k1 of round 1 */
    uint32_t round2_c0, round2_c2;
    uint32_t round3_c2;
    uint32_t key0[GC_PHILOX_ROUNDS], key1[GC_PHILOX_ROUNDS];
} gc_philox_plan;

GC_INLINE gc_philox_plan gc_plan_philox(uint32_t parameter, const gc_rng_key *key)
{
    gc_philox_plan plan;
    for (uint32_t r = 0; r < GC_PHILOX_ROUNDS; r++) {
        plan.key0[r] = key->seed + r * GC_PHILOX_W0;
        plan.key1[r] = key->rank + r * GC_PHILOX_W1;
    }
    /* round 1: c2 = step */
    uint64_t p1 = (uint64_t)GC_PHILOX_M1 * key->step;
    /* round 2: its c0 */
    uint64_t p0 = (uint64_t)GC_PHILOX_M0 * ((uint32_t)(p1 >> 32) ^ parameter ^ plan.key0[0]);
    plan.round1_c2 = key->stream ^ plan.key1[0];
    plan.round2_c0 = (uint32_t)p1 ^ plan.key0[1];
    plan.round2_c2 = (uint32_t)(p0 >> 32) ^ plan.key1[1];
    plan.round3_c2 = (uint32_t)p0 ^ plan.key1[2];
    return plan;
}

/* Superblocks of a segment from position `first` on, a superblock's first element. */
typedef struct {
    uint32_t first, count;
    /* 65536 / S: one for all, or 64 for a single superblock; finite, 0 for what is no scale */
    const float *factors;
    int is_uniform;
} gc_superblocks;

typedef void gc_superblocks_kernel(gc_encode_job *job, const gc_segment *segment,
                                   const gc_philox_plan *plan, const gc_superblocks *blocks);

/* Encode a segment: whole superblocks by `encode`; those cut by the segment, or whose factors are
 * not finite, are left to the portable encoder. */
void gc_encode_superblocks(gc_encode_job *job, const gc_segment *segment,
                           gc_superblocks_kernel *encode);

/* Settle, as the contract words them, the decisions of a superblock at `position` whose codes are
 * written and whose distance u, in the order of the elements, is not above GC_OPEN_DISTANCE. */
void gc_recheck_superblock(const gc_encode_job *job, const gc_segment *segment, uint32_t position,
                           const uint16_t distance[GC_SUPERBLOCK_NUMEL]);

#endif
