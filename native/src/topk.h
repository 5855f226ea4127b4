/* topk.h - where the codes of top-k stand: blocks of 4,096 elements of a parameter, cut to their
 * segment. */
#ifndef GC_TOPK_H
#define GC_TOPK_H

#include "numeric.h"

enum {
    GC_TOPK_DENSITY = 64, /* one element of so many is kept; also what a gap's quotient counts */
    /* of a gap: log2 of the density, the fewest with which k bytes always hold a block's gaps */
    GC_TOPK_LOW_BITS = 6,
    GC_TOPK_BLOCK_KEPT = GC_TOPK_BLOCK_NUMEL / GC_TOPK_DENSITY,
    GC_TOPK_GROUP_KEPT = GC_TOPK_GROUP_NUMEL / GC_TOPK_DENSITY
};

/* Elements that are kept of a block (or what is left of it) of `numel`. */
GC_INLINE uint32_t gc_topk_count(uint32_t numel)
{
    return (numel + GC_TOPK_DENSITY - 1) / GC_TOPK_DENSITY;
}

/* Bytes of such a block: gaps, then two bits a value. */
GC_INLINE uint32_t gc_topk_block_nbytes(uint32_t numel)
{
    uint32_t count = gc_topk_count(numel);
    return count + (count + 3) / 4;
}

/* Elements from `position` of a segment to the end of their block, cut at position `end`. */
GC_INLINE uint32_t gc_topk_block_left(const gc_segment *segment, uint32_t position, uint32_t end)
{
    uint32_t left = GC_TOPK_BLOCK_NUMEL - (segment->start + position) % GC_TOPK_BLOCK_NUMEL;
    return left < end - position ? left : end - position;
}

/* Bytes of the codes of the first `numel` elements of a segment that starts at `start`, whole
 * blocks but for the first and last. */
GC_INLINE uint64_t gc_topk_nbytes(uint32_t start, uint32_t numel)
{
    uint32_t head = (GC_TOPK_BLOCK_NUMEL - start % GC_TOPK_BLOCK_NUMEL) % GC_TOPK_BLOCK_NUMEL;
    if (head >= numel)
        return gc_topk_block_nbytes(numel);
    uint32_t rest = numel - head;
    return (uint64_t)gc_topk_block_nbytes(head) + gc_topk_block_nbytes(rest % GC_TOPK_BLOCK_NUMEL) +
           (uint64_t)(rest / GC_TOPK_BLOCK_NUMEL) * gc_topk_block_nbytes(GC_TOPK_BLOCK_NUMEL);
}

#endif
