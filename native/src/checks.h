/* checks.h - what every public kernel asks of its arguments before it touches memory. */
#ifndef GC_CHECKS_H
#define GC_CHECKS_H

#include "lanes.h"

enum { GC_MAX_PAYLOADS = 32767 };

GC_INLINE int gc_is_source_dtype(int dtype)
{
    return dtype == GC_F32 || dtype == GC_BF16 || dtype == GC_F16;
}
GC_INLINE int gc_is_value_dtype(int dtype) { return dtype == GC_F32 || dtype == GC_BF16; }

GC_INLINE int gc_is_block_bits(unsigned bits) { return bits == 2 || bits == 4 || bits == 8; }

GC_INLINE int gc_is_stream_nbytes(uint32_t nbytes)
{
    return nbytes >= GC_STREAM_NBYTES_LEAST && nbytes <= GC_STREAM_NBYTES_MOST;
}

/* Whether the scale groups of all segments are streams. */
GC_INLINE int gc_are_streams(const gc_segment *segments, size_t segment_count)
{
    for (size_t s = 0; segments && s < segment_count; s++)
        if (segments[s].numel && segments[s].group_numel != GC_STREAM_NUMEL)
            return 0;
    return 1;
}

/* Set the caller's flag, which the threads that share out one tensor share too. */
GC_INLINE void gc_report(uint32_t *nonfinite, uint32_t found)
{
    if (!found)
        return;
#if defined(__GNUC__) || defined(__clang__)
    __atomic_store_n(nonfinite, 1u, __ATOMIC_RELAXED);
#else
    *(volatile uint32_t *)nonfinite = 1;
#endif
}

/* 1 when the segments are well-formed; *has_elements tells whether they hold any element. */
GC_INLINE int gc_segments_ok(const gc_segment *segments, size_t segment_count, int *has_elements)
{
    *has_elements = 0;
    if (segment_count && !segments)
        return 0;
    for (size_t s = 0; s < segment_count; s++) {
        const gc_segment *segment = &segments[s];
        if (segment->start % 8 || segment->group_numel == 0 || segment->numel > GC_MAX_NUMEL ||
            segment->numel > UINT32_MAX - segment->start)
            return 0;
        *has_elements |= segment->numel != 0;
    }
    return 1;
}

GC_INLINE int gc_payloads_ok(const uint8_t *const *payloads, size_t payload_count, int has_elements)
{
    if (payload_count < 1 || payload_count > GC_MAX_PAYLOADS)
        return 0;
    if (!has_elements)
        return 1;
    for (size_t p = 0; p < payload_count; p++)
        if (!payloads || !payloads[p])
            return 0;
    return 1;
}

GC_INLINE int gc_world_ok(size_t world_size, unsigned lane_bits)
{
    return world_size >= 1 && world_size <= GC_MAX_PAYLOADS &&
           lane_bits == gc_lane_bits(world_size);
}

#endif
