/* entropy_decode.c - averages of streams of entropy-coded codes: their bits, two streams at a time.
 *
 * A stream has two chains of symbols, one from each end, and a symbol's length must be known before
 * the next one can be read: two streams keep a core busy, one does not. Any bytes are safe to
 * decode: what lies beyond a stream's end reads as 0.
 */
#include "entropy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { AT_A_TIME = 5 }; /* symbols of 11 bits that a refilled reader holds at least */

typedef struct {
    uint64_t bits;
    const uint8_t *at; /* what is read next: from here on, or (backwards) what ends here */
    const uint32_t *table;
    int8_t *codes;
    gc_stream_codes *into;
    uint32_t pairs, pair; /* to read, and the number of the next in the stream */
    int count;            /* of bits */
    int left;             /* bytes */
} reader;

GC_INLINE uint64_t swapped(uint64_t x)
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

/* Afterwards there are at least 56 bits. */
GC_INLINE void refill(reader *from, int backwards)
{
    if (from->left >= 8) {
        uint64_t more = backwards ? swapped(gc_load_u64(from->at - 8)) : gc_load_u64(from->at);
        int nbytes = (63 - from->count) >> 3;
        from->bits |= more << from->count;
        from->at += backwards ? -nbytes : nbytes;
        from->left -= nbytes;
        from->count += 8 * nbytes;
        return;
    }
    for (; from->count < 56; from->count += 8) {
        if (from->left <= 0)
            continue;
        uint8_t byte = backwards ? *--from->at : *from->at++;
        from->left--;
        from->bits |= (uint64_t)byte << from->count;
    }
}

GC_INLINE uint32_t take_bits(reader *from, int count)
{
    uint32_t out = (uint32_t)(from->bits & ((1ull << count) - 1));
    from->bits >>= count;
    from->count -= count;
    return out;
}

GC_INLINE int16_t take_escaped(reader *from)
{
    int length = (int)take_bits(from, 4);
    if (!length)
        return 0;
    uint32_t rest = take_bits(from, length), magnitude = 1u << (length - 1) | rest >> 1;
    return (int16_t)(rest & 1 ? -(int)magnitude : (int)magnitude);
}

static void read_escaped(reader *from, int backwards, uint32_t pair)
{
    refill(from, backwards);
    int16_t a = take_escaped(from), b = take_escaped(from);
    gc_escaped *one = &from->into->escaped[from->into->escaped_count++];
    *one = (gc_escaped){pair, a, b};
    refill(from, backwards);
}

GC_INLINE void read_pair(reader *from, int backwards, uint32_t i)
{
    uint32_t symbol = from->table[from->bits & ((1 << GC_CODE_NBITS) - 1)];
    int length = (int)(symbol & 15);
    from->bits >>= length;
    from->count -= length;
    from->codes[2 * i] = (int8_t)(symbol >> 8);
    from->codes[2 * i + 1] = (int8_t)(symbol >> 16);
    if (symbol & GC_ESCAPE)
        read_escaped(from, backwards, from->pair + i);
}

GC_INLINE void advance(reader *by, uint32_t pairs)
{
    by->codes += 2 * pairs;
    by->pair += pairs;
    by->pairs -= pairs;
}

static void read_rest(reader *from, int backwards)
{
    while (from->pairs) {
        uint32_t count = from->pairs < AT_A_TIME ? from->pairs : AT_A_TIME;
        refill(from, backwards);
        for (uint32_t i = 0; i < count; i++)
            read_pair(from, backwards, i);
        advance(from, count);
    }
}

/* Readers 0 and 2 go forwards, 1 and 3 backwards. */
static void read_four(reader from[4])
{
    reader a = from[0], b = from[1], c = from[2], d = from[3];
    uint32_t least = a.pairs < b.pairs ? a.pairs : b.pairs;
    least = c.pairs < least ? c.pairs : least;
    least = d.pairs < least ? d.pairs : least;
    for (; least >= AT_A_TIME; least -= AT_A_TIME) {
        refill(&a, 0);
        refill(&b, 1);
        refill(&c, 0);
        refill(&d, 1);
        for (uint32_t i = 0; i < AT_A_TIME; i++) {
            read_pair(&a, 0, i);
            read_pair(&b, 1, i);
            read_pair(&c, 0, i);
            read_pair(&d, 1, i);
        }
        advance(&a, AT_A_TIME);
        advance(&b, AT_A_TIME);
        advance(&c, AT_A_TIME);
        advance(&d, AT_A_TIME);
    }
    read_rest(&a, 0);
    read_rest(&b, 1);
    read_rest(&c, 0);
    read_rest(&d, 1);
}

typedef struct {
    const uint8_t *codes;
    uint32_t numel, code_nbytes;
    float scale;
} source;

static void open_readers(reader readers[2], const source *from, gc_stream_codes *into)
{
    const gc_entropy_table *table = &gc_entropy_tables()[from->codes[0] % GC_TABLE_COUNT];
    uint32_t pairs = (from->numel + 1) / 2, first = gc_front_pairs(from->numel);
    int left = (int)from->code_nbytes - 1;
    into->escaped_count = 0;
    readers[0] = (reader){0, from->codes + 1, table->decode, into->codes, into, first, 0, 0, left};
    readers[1] = (reader){0,
                          from->codes + from->code_nbytes,
                          table->decode,
                          into->codes + 2 * first,
                          into,
                          pairs - first,
                          first,
                          0,
                          left};
    memset(into->codes + 2 * pairs, 0, 64);
}

/* Read the codes of one stream, or of two. */
static void read_streams(const source *one, const source *two, gc_stream_codes into[2])
{
    reader readers[4];
    open_readers(readers, one, &into[0]);
    if (two) {
        open_readers(readers + 2, two, &into[1]);
        read_four(readers);
        return;
    }
    read_rest(&readers[0], 0);
    read_rest(&readers[1], 1);
}

static void add_stream(float *values, const gc_stream_codes *codes, const source *from,
                       gc_add_codes *add, int is_first)
{
    add(values, codes->codes, from->numel, from->scale, is_first);
    for (uint32_t i = 0; i < codes->escaped_count; i++) {
        const gc_escaped *one = &codes->escaped[i];
        uint32_t at = 2 * one->pair;
        values[at] += (float)one->a * from->scale;
        if (at + 1 < from->numel)
            values[at + 1] += (float)one->b * from->scale;
    }
}

static source source_of(const gc_decode_job *job, const uint8_t *payload, const gc_segment *segment,
                        gc_run run, size_t offset)
{
    return (source){payload + segment->codes + offset, run.numel,
                    (uint32_t)gc_stream_code_nbytes(run.numel, job->stream_nbytes),
                    gc_scale(payload, segment, run.group)};
}

/* One payload: two groups at a time. */
static void decode_one(gc_decode_job *job, const gc_segment *segment, gc_add_codes *add,
                       gc_write_values *write)
{
    gc_stream_codes codes[2];
    float values[GC_STREAM_NUMEL + 64];
    size_t offset = 0;
    for (uint32_t i = 0; i < segment->numel;) {
        source from[2];
        int count = 0;
        uint32_t first = i;
        for (; count < 2 && i < segment->numel; count++) {
            gc_run run = gc_run_at(segment, i, segment->numel);
            from[count] = source_of(job, job->payloads[0], segment, run, offset);
            offset += from[count].code_nbytes;
            i += run.numel;
        }
        read_streams(&from[0], count == 2 ? &from[1] : NULL, codes);
        for (int k = 0; k < count; k++) {
            add_stream(values, &codes[k], &from[k], add, 1);
            write(job, segment, first, from[k].numel, values, 1.0f);
            first += from[k].numel;
        }
    }
}

/* Several: two payloads at a time, added in order. */
static void decode_several(gc_decode_job *job, const gc_segment *segment, gc_add_codes *add,
                           gc_write_values *write)
{
    gc_stream_codes codes[2];
    float values[GC_STREAM_NUMEL + 64], factor = 1.0f / (float)job->payload_count;
    size_t offset = 0;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        for (size_t p = 0; p < job->payload_count; p += 2) {
            int has_next = p + 1 < job->payload_count;
            source from[2] = {source_of(job, job->payloads[p], segment, run, offset)};
            if (has_next)
                from[1] = source_of(job, job->payloads[p + 1], segment, run, offset);
            read_streams(&from[0], has_next ? &from[1] : NULL, codes);
            add_stream(values, &codes[0], &from[0], add, p == 0);
            if (has_next)
                add_stream(values, &codes[1], &from[1], add, 0);
        }
        write(job, segment, i, run.numel, values, factor);
        offset += gc_stream_code_nbytes(run.numel, job->stream_nbytes);
        i += run.numel;
    }
}

void gc_decode_streams(gc_decode_job *job, const gc_segment *segment, gc_add_codes *add,
                       gc_write_values *write)
{
    if (job->payload_count == 1)
        decode_one(job, segment, add, write);
    else
        decode_several(job, segment, add, write);
#if defined(__x86_64__)
    if (job->flags & GC_STREAM)
        _mm_sfence();
#endif
}
