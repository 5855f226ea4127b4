/* entropy.h - streams of entropy-coded codes (gc_entropy_encode): the tables, the choice of the
 * step, and what the tiers add to it.
 *
 * A stream is a group of at most GC_STREAM_NUMEL elements with a scale and a fixed number of bytes.
 * gradcomp.h pins its bytes.
 */
#ifndef GC_ENTROPY_H
#define GC_ENTROPY_H

#include "blocks.h"

enum {
    GC_ZEROS_TABLE = 7, /* its zero bits are pairs of 0 */
    GC_CODE_NBITS = 11, /* of a pair, at most */
    GC_TABLE_TOP = 7,   /* largest |code| of a pair that has a symbol in some table */
    GC_SYMBOLS_COUNT = 256,
    GC_LARGEST_CODE = 32767,
    GC_STEP_COUNT = 256,   /* candidate steps, 1/32 of an octave apart */
    GC_SAMPLE_NUMEL = 128, /* of every so many elements, looked at first */
    GC_SAMPLE_EVERY = 512,
    GC_COUNTED_CODES = 9, /* |code| 0 to 7, and 8 or more */
    GC_PAIRS_NUMEL = GC_STREAM_NUMEL / 2,
    /* of half a stream's pairs, each a symbol and two codes of 4 + 15 bits, and a flush */
    GC_HALF_NBYTES = GC_PAIRS_NUMEL / 2 * 7 + 16,
    GC_PUT_PAIRS = 16, /* that are written together */
    GC_QUAD_TOP = 3,   /* largest |code| in a quad */
    GC_QUADS_COUNT = 7 * 7 * 7 * 7
};

/* The one or two symbols that GC_CODE_NBITS bits hold: up to four codes, and their number; bits of
 * all symbols and of the first one. An escape symbol is alone, with 0 codes and 0 bits, but for its
 * own. */
typedef struct {
    int8_t codes[4];
    uint8_t bits, numel, first_bits, unused;
} gc_look;

/* One Huffman code of pairs (a, b), least significant bit first. Pairs without a symbol, and those
 * with |a| or |b| above 7, follow the escape symbol. */
typedef struct {
    /* by (a + 8) << 4 | (b + 8), a or b of -8 standing for what is out of range: the symbol, or the
     * escape, its bits at the top and their number at the bottom */
    uint64_t symbols[GC_SYMBOLS_COUNT];
    /* the same: the lower eight bits, their number << 8, the other bits << 12 */
    uint16_t joined[GC_SYMBOLS_COUNT];
    /* of quads (a, b, c, d) of codes up to GC_QUAD_TOP, by ((7 a + b) 7 + c) 7 + d with 3 added to
     * each: both symbols' bits << 7, their number at the bottom. Not for codes above `top`. */
    uint32_t quads[GC_QUADS_COUNT];
    int is_narrow; /* one code in forty at most is above GC_QUAD_TOP */
    int top;       /* largest |code| that has a symbol */
    gc_look decode[1 << GC_CODE_NBITS]; /* by the next bits */
    /* in 1/64 bit: of a pair by |a| and |b|, the mean over signs */
    uint32_t pair_costs[GC_COUNTED_CODES][16];
} gc_entropy_table;

typedef struct {
    gc_entropy_table tables[GC_TABLE_COUNT];
    /* in 1/64 bit: by |code| and table, of one code among codes as often as the table was made
     * for */
    uint32_t costs[GC_COUNTED_CODES][GC_TABLE_COUNT];
} gc_entropy_tables;

/* Made by the first call. */
const gc_entropy_tables *gc_get_entropy_tables(void);

/* Bytes of the codes of a stream of `numel` elements, where a whole one has `stream_nbytes` with
 * its scale. */
GC_INLINE size_t gc_stream_code_nbytes(uint32_t numel, uint32_t stream_nbytes)
{
    if (numel == GC_STREAM_NUMEL)
        return stream_nbytes - 4;
    return ((uint64_t)numel * stream_nbytes + GC_STREAM_NUMEL - 1) / GC_STREAM_NUMEL + 4;
}

/* Bytes of the codes of elements [start, start + numel) of a parameter. */
size_t gc_streams_code_nbytes(uint32_t start, uint32_t numel, uint32_t stream_nbytes);

/* Pairs in the first half of a stream, which is written forwards. */
GC_INLINE uint32_t gc_front_pairs(uint32_t numel) { return ((numel + 1) / 2 + 1) / 2; }

/* ---- encoding -------------------------------------------------------------------------------- */
/* What codes leave of x: (x - code * scale) * decay. */
typedef struct {
    float *out; /* NULL: not wanted */
    float scale, inverse, decay;
    int streams;    /* write past the caches */
    int is_written; /* by `put` already, and `left` set */
    double left;    /* the sum of the magnitudes before the decay */
} gc_entropy_rest;

typedef struct {
    gc_block_stage block; /* x, read by `take` */
    int16_t codes[GC_STREAM_NUMEL + 64];
    uint8_t pairs[GC_PAIRS_NUMEL + 64]; /* as indices of gc_entropy_table.symbols */
    uint16_t escapes[GC_PAIRS_NUMEL / GC_PUT_PAIRS + 2]; /* a bit for each pair that is escaped */
    uintptr_t next_src, next_residual;                   /* of the next stream; no residual: 0 */
    uint32_t src_size;
    gc_entropy_rest rest;
} gc_entropy_stage;

/* Ask for elements [i, i + 32) of the next stream, which need not exist. */
GC_INLINE void gc_fetch_next(const gc_entropy_stage *stage, uint32_t i)
{
#if defined(__GNUC__) || defined(__clang__)
    enum { L2 = 2 };
    uintptr_t src = stage->next_src + (uintptr_t)i * stage->src_size,
              residual = stage->next_residual + (uintptr_t)i * sizeof(float);
    __builtin_prefetch((const char *)src, 0, L2);
    if (stage->src_size == sizeof(float))
        __builtin_prefetch((const char *)src + 64, 0, L2);
    if (stage->next_residual) {
        __builtin_prefetch((const char *)residual, 0, L2);
        __builtin_prefetch((const char *)residual + 64, 0, L2);
    }
#else
    (void)stage;
    (void)i;
#endif
}

typedef struct {
    gc_block_take *take;
    /* Count the codes that x * inverse rounds to, by |code|: of all elements, or of a whole
     * stream's the first `sampled` of every GC_SAMPLE_EVERY. */
    void (*count)(const gc_entropy_stage *stage, uint32_t numel, uint32_t sampled, float inverse,
                  uint32_t counts[GC_COUNTED_CODES]);
    /* sums[i]: counts times column i. */
    void (*weigh)(const uint32_t counts[GC_COUNTED_CODES], const uint32_t (*matrix)[16],
                  uint32_t sums[16]);
    /* Write x * rest.inverse, rounded, in pairs to the bytes behind the first of the codes', zeros
     * in between; 0 if they do not fit. *needed: bytes of the codes. May write the rest of x
     * meanwhile. Leaves codes that `rest` needs. */
    int (*put)(gc_entropy_stage *stage, const gc_entropy_table *table, uint32_t numel,
               uint32_t code_nbytes, uint8_t *codes, size_t *needed);
    /* Write the rest of x. */
    void (*rest)(gc_entropy_stage *stage, uint32_t numel);
} gc_entropy_encoder;

void gc_weigh_avx2(const uint32_t counts[GC_COUNTED_CODES], const uint32_t (*matrix)[16],
                   uint32_t sums[16]);
void gc_encode_streams(gc_encode_job *job, const gc_segment *segment,
                       const gc_entropy_encoder *tier);

/* Code of x: x * inverse rounded to nearest even. */
GC_INLINE int gc_entropy_code(float x, float inverse)
{
    float t = x * inverse;
    t = t > -GC_LARGEST_CODE ? t : -GC_LARGEST_CODE;
    t = t < GC_LARGEST_CODE ? t : GC_LARGEST_CODE;
    return (int)(gc_bits_of(t + GC_ROUNDING_MAGIC) - gc_bits_of(GC_ROUNDING_MAGIC));
}

/* Index of a pair in gc_entropy_table.symbols. */
GC_INLINE uint8_t gc_pair_index(int a, int b)
{
    if (a < -GC_TABLE_TOP || a > GC_TABLE_TOP || b < -GC_TABLE_TOP || b > GC_TABLE_TOP)
        return 0;
    return (uint8_t)((a + 8) << 4 | (b + 8));
}

/* ---- decoding -------------------------------------------------------------------------------- */
/* A pair behind an escape symbol. */
typedef struct {
    uint32_t pair;
    int16_t a, b;
} gc_escaped;

/* The codes of one stream; those of escaped pairs are 0 in `codes`. */
typedef struct {
    int8_t codes[GC_STREAM_NUMEL + 64];
    gc_escaped escaped[GC_PAIRS_NUMEL];
    uint32_t escaped_count;
} gc_stream_codes;

/* One stream in a payload. */
typedef struct {
    const uint8_t *codes;
    uint32_t numel, code_nbytes;
    float scale;
} gc_stream;

/* Write values * factor as elements from `first` of the segment on. */
typedef void gc_write_values(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                             uint32_t numel, const float *values, float factor);
gc_write_values gc_write_values_portable;

typedef struct {
    /* gc_read_streams: the codes of one stream, or of two; zeros follow them up to a multiple of
     * 32 */
    void (*read)(const gc_stream *one, const gc_stream *two, gc_stream_codes *into);
    /* values[i] = code * scale, added to what stands there unless `is_first` */
    void (*add)(float *values, const int8_t *codes, uint32_t numel, float scale, int is_first);
    gc_write_values *write;
    /* Write code * scale as fp32, where no value can overflow; NULL: by `add` and `write`. */
    void (*write_codes)(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                        uint32_t numel, const int8_t *codes, float scale);
} gc_entropy_decoder;

void gc_decode_streams(gc_decode_job *job, const gc_segment *segment,
                       const gc_entropy_decoder *decoder);

#endif
