/* entropy_read.h - the bits of streams of entropy-coded codes, for tiers to compile in their own
 * way.
 *
 * A symbol's length must be known before the next one can be read, so one chain of symbols leaves a
 * core idle. Two streams are read at a time, each from both ends: four chains, five looks at one,
 * then at the next, which an out-of-order core overlaps. A look finds one symbol or two.
 */
#ifndef GC_ENTROPY_READ_H
#define GC_ENTROPY_READ_H

#include "entropy.h"

enum {
    GC_AT_A_TIME = 5,                    /* looks at 11 bits in a word of 57 */
    GC_CODES_AT_A_TIME = 4 * GC_AT_A_TIME /* at most */
};

/* One end of a stream. */
typedef struct {
    const uint8_t *at;           /* what is read next begins here, or (backwards) ends here */
    unsigned used;               /* bits of the first byte that have been read, 0 to 7 */
    const uint8_t *first, *last; /* of the stream; beyond there are zeros */
    const uint8_t *limit;        /* of `at`, for a whole word to be read */
    const gc_look *table;
    int8_t *codes, *end; /* of the next pair, and behind its last */
} gc_chain;

GC_INLINE uint64_t gc_swapped(uint64_t x)
{
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_bswap64(x);
#else
    uint64_t out = 0;
    for (int i = 0; i < 64; i += 8)
        out |= (x >> i & 0xFF) << (56 - i);
    return out;
#endif
}

/* At least the next 57 bits. */
GC_INLINE uint64_t gc_word_of(const gc_chain *from, int backwards)
{
    uint64_t word = backwards ? gc_swapped(gc_load_u64(from->at - 8)) : gc_load_u64(from->at);
    return word >> from->used;
}

GC_INLINE int gc_has_word(const gc_chain *from, int backwards)
{
    return backwards ? from->at >= from->limit : from->at <= from->limit;
}

GC_INLINE void gc_skip_bits(gc_chain *from, int backwards, unsigned bits)
{
    unsigned end = from->used + bits;
    from->at += backwards ? -(ptrdiff_t)(end >> 3) : (ptrdiff_t)(end >> 3);
    from->used = end & 7;
}

/* A code behind an escape symbol; *bits: how many it takes. */
GC_INLINE int16_t gc_escaped_code(uint64_t word, unsigned *bits)
{
    unsigned length = word & 15;
    *bits = 4 + length;
    if (!length)
        return 0;
    uint32_t below = (uint32_t)(word >> 5) & ((1u << (length - 1)) - 1);
    int magnitude = (int)(1u << (length - 1) | below);
    return (int16_t)(word & 16 ? -magnitude : magnitude);
}

/* Read one pair, near the end of the stream, beyond it, or one that is escaped. */
GC_INLINE void gc_read_pair(gc_chain *from, int backwards, gc_stream_codes *into)
{
    uint64_t word = 0;
    if (gc_has_word(from, backwards)) {
        word = gc_word_of(from, backwards);
    } else {
        for (int i = 0; i < 8; i++) {
            ptrdiff_t left = backwards ? from->at - from->first : from->last - from->at;
            if (i < left)
                word |= (uint64_t)(backwards ? from->at[-1 - i] : from->at[i]) << 8 * i;
        }
        word >>= from->used;
    }
    const gc_look *look = &from->table[word & ((1 << GC_CODE_NBITS) - 1)];
    unsigned bits = look->first_bits;
    memcpy(from->codes, look->codes, 2);
    if (!look->numel) {
        unsigned more, length = bits;
        gc_escaped *one = &into->escaped[into->escaped_count++];
        one->pair = (uint32_t)(from->codes - into->codes) / 2;
        one->a = gc_escaped_code(word >> length, &more);
        length += more;
        one->b = gc_escaped_code(word >> length, &more);
        bits = length + more;
    }
    gc_skip_bits(from, backwards, bits);
    from->codes += 2;
}

/* Whether a chain has a word, and codes to come for what is in it. */
GC_INLINE int gc_has_many(const gc_chain *from, int backwards)
{
    return from->end - from->codes >= GC_CODES_AT_A_TIME && gc_has_word(from, backwards);
}

/* Read GC_AT_A_TIME times one or two pairs of a chain that has many. An escaped one is where the
 * looks that follow stay. */
GC_INLINE void gc_read_pairs(gc_chain *from, int backwards, gc_stream_codes *into)
{
    uint64_t word = gc_word_of(from, backwards);
    const gc_look *look = from->table;
    unsigned bits = 0;
    int8_t *codes = from->codes;
    for (int i = 0; i < GC_AT_A_TIME; i++) {
        look = &from->table[word & ((1 << GC_CODE_NBITS) - 1)];
        memcpy(codes, look->codes, 4);
        codes += look->numel;
        word >>= look->bits;
        bits += look->bits;
    }
    gc_skip_bits(from, backwards, bits);
    from->codes = codes;
    if (!look->numel)
        gc_read_pair(from, backwards, into);
}

GC_INLINE void gc_read_rest(gc_chain *from, int backwards, gc_stream_codes *into)
{
    while (gc_has_many(from, backwards))
        gc_read_pairs(from, backwards, into);
    while (from->codes < from->end)
        gc_read_pair(from, backwards, into);
}

GC_INLINE void gc_open_chains(gc_chain chains[2], const gc_stream *from, gc_stream_codes *into)
{
    const gc_entropy_table *table =
        &gc_get_entropy_tables()->tables[from->codes[0] % GC_TABLE_COUNT];
    const uint8_t *first = from->codes + 1, *last = from->codes + from->code_nbytes;
    uint32_t pairs = (from->numel + 1) / 2, front = gc_front_pairs(from->numel);
    int8_t *middle = into->codes + 2 * front, *end = into->codes + 2 * pairs;
    chains[0] = (gc_chain){first, 0, first, last, last - 8, table->decode, into->codes, middle};
    chains[1] = (gc_chain){last, 0, first, last, first + 8, table->decode, middle, end};
    into->escaped_count = 0;
    memset(end, 0, 64);
}

/* Read the codes of one stream, or of two. */
GC_INLINE void gc_read_streams(const gc_stream *one, const gc_stream *two, gc_stream_codes *into)
{
    gc_chain a[2], b[2];
    gc_open_chains(a, one, &into[0]);
    if (two) {
        gc_open_chains(b, two, &into[1]);
        gc_chain a0 = a[0], a1 = a[1], b0 = b[0], b1 = b[1];
        while (gc_has_many(&a0, 0) && gc_has_many(&a1, 1) && gc_has_many(&b0, 0) &&
               gc_has_many(&b1, 1)) {
            gc_read_pairs(&a0, 0, &into[0]);
            gc_read_pairs(&a1, 1, &into[0]);
            gc_read_pairs(&b0, 0, &into[1]);
            gc_read_pairs(&b1, 1, &into[1]);
        }
        a[0] = a0;
        a[1] = a1;
        gc_read_rest(&b0, 0, &into[1]);
        gc_read_rest(&b1, 1, &into[1]);
    }
    while (gc_has_many(&a[0], 0) && gc_has_many(&a[1], 1)) {
        gc_read_pairs(&a[0], 0, &into[0]);
        gc_read_pairs(&a[1], 1, &into[0]);
    }
    gc_read_rest(&a[0], 0, &into[0]);
    gc_read_rest(&a[1], 1, &into[0]);
}

#endif
