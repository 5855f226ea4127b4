/* lanes.h - integer lanes of 2 to 16 bits in a little-endian bit stream. */
#ifndef GC_LANES_H
#define GC_LANES_H

#include "numeric.h"

/* Bits that hold 0 .. 2 * world_size: ceil(log2(2 * world_size + 1)). */
GC_INLINE unsigned gc_lane_bits(size_t world_size)
{
    unsigned bits = 0;
    for (size_t top = 2 * world_size; top; top >>= 1)
        bits++;
    return bits;
}

/* Lane i; touches only the bytes that hold it. */
GC_INLINE uint32_t gc_lane_at(const uint8_t *lanes, uint32_t i, unsigned bits)
{
    uint64_t bit = (uint64_t)i * bits;
    const uint8_t *p = lanes + bit / 8;
    /* bytes after the first: 0, 1 or 2 */
    unsigned shift = (unsigned)(bit % 8), last = (shift + bits - 1) / 8;
    uint32_t window = p[0];
    if (last >= 1)
        window |= (uint32_t)p[1] << 8;
    if (last >= 2)
        window |= (uint32_t)p[2] << 16;
    return window >> shift & ((1u << bits) - 1);
}

/* Writes lanes one after the other, from one that starts at a byte boundary. */
typedef struct {
    uint8_t *next;
    uint64_t pending; /* bits not yet written, the first one lowest */
    unsigned pending_bits, bits;
} gc_lane_writer;

GC_INLINE gc_lane_writer gc_lane_writer_at(uint8_t *lanes, uint32_t first, unsigned bits)
{
    gc_lane_writer writer = {lanes + (uint64_t)first * bits / 8, 0, 0, bits};
    return writer;
}

GC_INLINE void gc_lane_write(gc_lane_writer *writer, uint32_t lane)
{
    writer->pending |= (uint64_t)(lane & ((1u << writer->bits) - 1)) << writer->pending_bits;
    writer->pending_bits += writer->bits;
    for (; writer->pending_bits >= 8; writer->pending_bits -= 8, writer->pending >>= 8)
        *writer->next++ = (uint8_t)writer->pending;
}

/* Write the last byte, padded with 0. */
GC_INLINE void gc_lane_flush(gc_lane_writer *writer)
{
    if (writer->pending_bits)
        *writer->next = (uint8_t)writer->pending;
}

#endif
