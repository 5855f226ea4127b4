/* entropy_write.h - the bits of a stream of entropy-coded codes, for tiers to compile in their own
 * way. */
#ifndef GC_ENTROPY_WRITE_H
#define GC_ENTROPY_WRITE_H

#include "entropy.h"

typedef struct {
    uint64_t bits;
    unsigned count;
    uint8_t *out;
} gc_writer;

GC_INLINE void gc_put(gc_writer *to, uint64_t bits, unsigned count)
{
    to->bits |= bits << to->count;
    to->count += count;
}

/* Leaves less than eight bits. */
GC_INLINE void gc_flush(gc_writer *to)
{
    gc_store_u64(to->out, to->bits);
    to->out += to->count >> 3;
    to->bits >>= to->count & 56;
    to->count &= 7;
}

/* Bytes of all that was written to `out`. */
GC_INLINE size_t gc_end(gc_writer *to, const uint8_t *out)
{
    if (to->count)
        *to->out++ = (uint8_t)to->bits;
    return (size_t)(to->out - out);
}

/* The number of bits of |code|, in four bits; below the leading one these bits, behind the sign. */
GC_INLINE void gc_put_escaped(gc_writer *to, int code)
{
    uint32_t magnitude = (uint32_t)(code < 0 ? -code : code), length = gc_bit_length(magnitude);
    gc_put(to, length, 4);
    if (length)
        gc_put(to, (uint32_t)(code < 0) | (magnitude & ((1u << (length - 1)) - 1)) << 1, length);
}

/* At most four symbols: 44 bits, and 7 that a flush has left. Each pushes those before it down;
 * their numbers of bits, at the bottom, are pushed out. */
GC_INLINE void gc_put_symbols(gc_writer *to, const gc_entropy_table *table, const uint8_t *pairs,
                              uint32_t count)
{
    uint64_t bits = 0, length = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t symbol = table->symbols[pairs[i]];
        bits = bits >> (symbol & 63) | symbol;
        length += symbol; /* at most 44 at the bottom */
    }
    gc_put(to, bits >> (-length & 63), length & 63);
    gc_flush(to);
}

/* The same, where some are escaped: a bit each. */
GC_INLINE void gc_put_escaping(gc_writer *to, const gc_entropy_table *table, const uint8_t *pairs,
                               const int16_t *codes, uint32_t count, uint32_t escapes)
{
    for (uint32_t i = 0; i < count; i++) {
        gc_put_symbols(to, table, pairs + i, 1);
        if (escapes >> i & 1) {
            gc_put_escaped(to, codes[2 * i]);
            gc_put_escaped(to, codes[2 * i + 1]);
            gc_flush(to);
        }
    }
}

/* Write pairs [first, end), and fetch as much of the next stream: memory is idle meanwhile. */
GC_INLINE void gc_put_pairs(gc_writer *to, const gc_entropy_table *table,
                            const gc_entropy_stage *stage, uint32_t first, uint32_t end)
{
    for (uint32_t i = first, count; i < end; i += count) {
        uint32_t escapes = (uint32_t)stage->escapes[i / GC_PUT_PAIRS] >> i % GC_PUT_PAIRS;
        count = GC_PUT_PAIRS - i % GC_PUT_PAIRS;
        count = end - i < count ? end - i : count;
        gc_fetch_next(stage, 2 * i);
        if (escapes || count < GC_PUT_PAIRS) {
            gc_put_escaping(to, table, stage->pairs + i, stage->codes + 2 * i, count, escapes);
            continue;
        }
        for (uint32_t k = i; k < i + GC_PUT_PAIRS; k += 4)
            gc_put_symbols(to, table, stage->pairs + k, 4);
    }
}

/* Write pairs [first, end) to `out`; return their bytes. */
typedef size_t gc_pairs_writer(const gc_entropy_table *table, const gc_entropy_stage *stage,
                               uint32_t first, uint32_t end, uint8_t *out);

GC_INLINE size_t gc_write_pairs(const gc_entropy_table *table, const gc_entropy_stage *stage,
                                uint32_t first, uint32_t end, uint8_t *out)
{
    gc_writer to = {0, 0, out};
    gc_put_pairs(&to, table, stage, first, end);
    return gc_end(&to, out);
}

/* Both halves of a stream's bits, the second backwards from the end; 0 if they do not fit. */
GC_INLINE int gc_join_halves(const uint8_t *front, size_t head, const uint8_t *back, size_t tail,
                             uint32_t code_nbytes, uint8_t *codes, size_t *needed)
{
    *needed = 1 + head + tail;
    if (*needed > code_nbytes)
        return 0;
    memcpy(codes + 1, front, head);
    memset(codes + 1 + head, 0, code_nbytes - *needed);
    for (size_t i = 0; i < tail; i++)
        codes[code_nbytes - 1 - i] = back[i];
    return 1;
}

/* gc_entropy_encoder.put, by what writes pairs */
GC_INLINE int gc_put_stream(const gc_entropy_stage *stage, const gc_entropy_table *table,
                            uint32_t numel, uint32_t code_nbytes, uint8_t *codes, size_t *needed,
                            gc_pairs_writer *write)
{
    uint8_t front[GC_HALF_NBYTES], back[GC_HALF_NBYTES];
    uint32_t pairs = (numel + 1) / 2, first = gc_front_pairs(numel);
    size_t head = write(table, stage, 0, first, front);
    size_t tail = write(table, stage, first, pairs, back);
    return gc_join_halves(front, head, back, tail, code_nbytes, codes, needed);
}

#endif
