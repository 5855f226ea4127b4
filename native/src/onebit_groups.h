/* onebit_groups.h - what the vector tiers' 1-bit encoders share: the walk over groups.
 *
 * A group of at most GC_ONEBIT_STAGE_NUMEL elements is read from memory once: x = g + r is staged
 * in the first-level cache for the second pass. Larger groups go chunk by chunk and read g and r
 * twice. A group with values that are not finite is left to the portable encoder before its
 * residual is touched.
 */
#ifndef GC_ONEBIT_GROUPS_H
#define GC_ONEBIT_GROUPS_H

#include "numeric.h"

/* One chunk of x and its bits; vectors may write 16 elements beyond its end within the arrays. */
typedef struct {
    float x[GC_ONEBIT_STAGE_NUMEL];
    uint8_t bits[GC_ONEBIT_STAGE_NUMEL / 8];
} gc_onebit_stage;

typedef struct {
    double sums[2];        /* of the two classes, of the run (GC_RUN_NUMEL) under way */
    uint32_t ones;         /* elements of class 1 */
    uint32_t any_gradient; /* 0 when every |g| is 0 */
    uint32_t absmax_bits;  /* of x */
} gc_onebit_totals;

/* The part of the tensors that a group lies in, and what becomes of it. */
typedef struct {
    const void *src;
    int dtype;
    uint64_t data;
    const float *residual; /* NULL: none */
    float means[2];
    float decay; /* of what codes leave out */
} gc_onebit_view;

typedef struct {
    /* Stage `numel` elements from element `chunk` of the group on, their bits with zeros up to a
     * multiple of 64, and add them to the totals, block by block. */
    void (*take)(gc_onebit_totals *totals, gc_onebit_stage *stage, const gc_onebit_view *view,
                 uint32_t chunk, uint32_t numel);
    /* out = decay * (x - q) for the staged elements; returns the sum of |x - q|. `streams` writes
     * past the caches, for a plane that is not read before the next step, which saves reading each
     * line first. */
    double (*leave_staged)(const gc_onebit_stage *stage, const gc_onebit_view *view, uint32_t numel,
                           float *out, int streams);
    /* The same for a group that was not staged whole: x is made again. `out` may be
     * view->residual. */
    double (*leave_again)(const gc_onebit_view *view, uint32_t numel, float *out);
} gc_onebit_tier;

void gc_encode_onebit_groups(gc_encode_job *job, const gc_segment *segment,
                             const gc_onebit_tier *tier);

/* Clear the staged bits from `numel`, rounded up to 16, to a multiple of 64; returns the number of
 * ones. */
GC_INLINE uint32_t gc_finish_bits(gc_onebit_stage *stage, uint32_t numel)
{
    uint32_t ones = 0, words = (numel + 63) / 64, taken = (numel + 15) / 16 * 2;
    memset(stage->bits + taken, 0, 8 * words - taken);
    for (uint32_t w = 0; w < words; w++) {
        uint64_t bits;
        memcpy(&bits, stage->bits + 8 * w, 8);
        ones += (uint32_t)__builtin_popcountll(bits);
    }
    return ones;
}

#endif
