/* entropy512.c - streams of entropy-coded codes: encoding in vectors of sixteen. */
#include "internal.h"

#if defined(__x86_64__)
#include "common512.h"
#include "entropy.h"
#include "entropy_write.h"

/* Codes of sixteen elements before they are cut; rounding is to nearest even. */
GC_AVX512_INLINE __m512i codes16(const float *x, __m512 inverse)
{
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
}

GC_AVX512_INLINE uint32_t total_bytes(__m512i sums)
{
    return (uint32_t)_mm512_reduce_add_epi64(_mm512_sad_epu8(sums, _mm512_setzero_si512()));
}

GC_AVX512_INLINE void count64(const float *x, __m512 inverse, __m512i seen[GC_COUNTED_CODES - 1])
{
    __m512i low = _mm512_packs_epi32(codes16(x, inverse), codes16(x + 16, inverse)),
            high = _mm512_packs_epi32(codes16(x + 32, inverse), codes16(x + 48, inverse));
    /* in any order: only counts matter. Saturated codes stay above 7. */
    __m512i bytes = _mm512_abs_epi8(_mm512_packs_epi16(low, high));
    const __m512i one = _mm512_set1_epi8(1);
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++) {
        __mmask64 same = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8((char)k));
        seen[k] = _mm512_mask_add_epi8(seen[k], same, seen[k], one);
    }
}

/* Elements past the end, up to a multiple of 64, are 0, and taken off again. */
GC_AVX512 static void count(const gc_entropy_stage *stage, uint32_t numel, uint32_t sampled,
                            float inverse, uint32_t counts[GC_COUNTED_CODES])
{
    const __m512 by = _mm512_set1_ps(inverse);
    __m512i seen[GC_COUNTED_CODES - 1]; /* 4096 / 64 = 64 at most in a byte */
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++)
        seen[k] = _mm512_setzero_si512();
    uint32_t rest = 0, past = (0 - numel) % 64;
    for (uint32_t i = 0; i < numel; i += 64) {
        if (i % GC_SAMPLE_EVERY >= sampled)
            continue;
        count64(stage->block.x + i, by, seen);
        rest += 64;
    }
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++) {
        counts[k] = total_bytes(seen[k]);
        rest -= counts[k];
    }
    counts[GC_COUNTED_CODES - 1] = rest;
    counts[0] -= past;
}

/* Thirty-two codes in order, as gc_entropy_code. */
GC_AVX512_INLINE __m512i codes32(const float *x, __m512 inverse)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i both = _mm512_packs_epi32(codes16(x, inverse), codes16(x + 16, inverse));
    both = _mm512_max_epi16(both, _mm512_set1_epi16(-GC_LARGEST_CODE));
    return _mm512_permutexvar_epi64(order, both);
}

/* Indices of thirty-two pairs of codes up to GC_TABLE_TOP, and of -8 for what is above it. */
GC_AVX512_INLINE __m512i indices_of(__m512i bytes)
{
    return _mm512_maddubs_epi16(_mm512_add_epi8(bytes, _mm512_set1_epi8(8)),
                                _mm512_set1_epi16(0x0110));
}

/* Codes and pairs of elements [i, i + 64), and which escape a table that reaches to `top`. */
GC_AVX512 static void make_pairs(gc_entropy_stage *stage, uint32_t i, __m512 inverse, int top)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i low = codes32(stage->block.x + i, inverse),
            high = codes32(stage->block.x + i + 32, inverse);
    _mm512_storeu_si512(stage->codes + i, low);
    _mm512_storeu_si512(stage->codes + i + 32, high);
    __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packs_epi16(low, high));
    __m512i magnitudes = _mm512_abs_epi8(bytes);
    __mmask64 far = _mm512_cmpgt_epu8_mask(magnitudes, _mm512_set1_epi8((char)top)),
              above = _mm512_cmpgt_epu8_mask(magnitudes, _mm512_set1_epi8(GC_TABLE_TOP));
    uint32_t escapes = (uint32_t)_pext_u64(far | far >> 1, 0x5555555555555555u);
    stage->escapes[i / 32] = (uint16_t)escapes;
    stage->escapes[i / 32 + 1] = (uint16_t)(escapes >> 16);
    bytes = _mm512_mask_blend_epi8(above, bytes, _mm512_set1_epi8(-8));
    _mm256_storeu_si256((__m256i *)(stage->pairs + i / 2), _mm512_cvtepi16_epi8(indices_of(bytes)));
}

/* The symbols of thirty-two pairs, as gc_entropy_table.joined. */
GC_AVX512_INLINE __m512i look_up(const __m512i table[8], __m512i indices)
{
    __mmask32 second = _mm512_movepi16_mask(_mm512_slli_epi16(indices, 9)),
              upper = _mm512_movepi16_mask(_mm512_slli_epi16(indices, 8));
    __m512i quarters[4];
    for (int k = 0; k < 4; k++)
        quarters[k] = _mm512_permutex2var_epi16(table[2 * k], indices, table[2 * k + 1]);
    return _mm512_mask_blend_epi16(upper, _mm512_mask_blend_epi16(second, quarters[0], quarters[1]),
                                   _mm512_mask_blend_epi16(second, quarters[2], quarters[3]));
}

/* Write thirty-two symbols: four at a time, or eight where they fit. */
GC_AVX512_INLINE void put_symbols(gc_writer *to, __m512i symbols)
{
    enum { MOST = 56 };
    const __m512i low16 = _mm512_set1_epi32(0xFFFF), low32 = _mm512_set1_epi64(0xFFFFFFFF);
    uint64_t bits[8], lengths[8];
    __m512i length = _mm512_and_si512(_mm512_srli_epi16(symbols, 8), _mm512_set1_epi16(15));
    __m512i code = _mm512_or_si512(
        _mm512_and_si512(symbols, _mm512_set1_epi16(0xFF)),
        _mm512_and_si512(_mm512_srli_epi16(symbols, 4), _mm512_set1_epi16(0x700)));
    __m512i first = _mm512_and_si512(length, low16);
    code = _mm512_or_si512(_mm512_and_si512(code, low16),
                           _mm512_sllv_epi32(_mm512_srli_epi32(code, 16), first));
    length = _mm512_add_epi32(first, _mm512_srli_epi32(length, 16));
    first = _mm512_and_si512(length, low32);
    code = _mm512_or_si512(_mm512_and_si512(code, low32),
                           _mm512_sllv_epi64(_mm512_srli_epi64(code, 32), first));
    length = _mm512_add_epi64(first, _mm512_srli_epi64(length, 32));
    /* of eight symbols, in every other lane */
    __m512i both = _mm512_add_epi64(length, _mm512_unpackhi_epi64(length, length));
    int narrow = !_mm512_mask_cmpgt_epi64_mask(0x55, both, _mm512_set1_epi64(MOST));
    if (narrow) {
        code = _mm512_or_si512(code, _mm512_sllv_epi64(_mm512_unpackhi_epi64(code, code), length));
        length = both;
    }
    _mm512_storeu_si512(bits, code);
    _mm512_storeu_si512(lengths, length);
#pragma GCC unroll 8
    for (uint32_t k = 0; k < 8; k++) {
        if (narrow && k % 2)
            continue;
        gc_put(to, bits[k], (unsigned)lengths[k]);
        gc_flush(to);
    }
}

typedef struct {
    float *out;
    __m512 inverse, scale, decay, left;
} rest_writer;

/* Of the valid ones of sixteen elements. */
GC_AVX512_INLINE void write_rest(rest_writer *to, const float *x, uint32_t i, __m512i codes,
                                 __mmask16 valid, int streams)
{
    __m512 q = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), to->scale),
           left = _mm512_maskz_sub_ps(valid, _mm512_loadu_ps(x + i), q),
           kept = _mm512_mul_ps(left, to->decay);
    to->left = _mm512_add_ps(to->left, _mm512_abs_ps(left));
    if (streams)
        _mm512_stream_ps(to->out + i, kept);
    else
        _mm512_mask_storeu_ps(to->out + i, valid, kept);
}

GC_AVX512_INLINE rest_writer open_rest(const gc_entropy_rest *of)
{
    return (rest_writer){of->out, _mm512_set1_ps(of->inverse), _mm512_set1_ps(of->scale),
                         _mm512_set1_ps(of->decay), _mm512_setzero_ps()};
}

GC_AVX512_INLINE int rest_streams(const gc_entropy_rest *to)
{
    return to->streams && (uintptr_t)to->out % sizeof(__m512) == 0;
}

/* Write the bits of elements [i, i + 64), some of which escape. */
__attribute__((noinline)) GC_AVX512 static gc_writer
put_escaping(gc_writer to, const gc_entropy_table *table, gc_entropy_stage *stage, uint32_t i)
{
    make_pairs(stage, i, _mm512_set1_ps(stage->rest.inverse), table->top);
    gc_put_pairs(&to, table, stage, i / 2, i / 2 + 32);
    return to;
}

/* Sixteen codes that make_pairs has left. */
GC_AVX512_INLINE __m512i load_codes(const gc_entropy_stage *stage, uint32_t i)
{
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(stage->codes + i)));
}

/* Write half of a whole stream and what is left of x: memory takes the one, and fetches as much of
 * the next stream, while bits are joined. */
GC_AVX512_INLINE size_t write_half(const gc_entropy_table *table, gc_entropy_stage *stage,
                                   uint32_t first, uint8_t *out, rest_writer *rest, int keeps,
                                   int streams)
{
    gc_writer to = {0, 0, out};
    rest_writer left = *rest;
    const float *x = stage->block.x;
    const __m512i reach = _mm512_set1_epi8((char)table->top),
                  order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i joined[8];
    for (int k = 0; k < 8; k++)
        joined[k] = _mm512_loadu_si512(table->joined + 32 * k);
    for (uint32_t i = first; i < first + GC_STREAM_NUMEL / 2; i += 64) {
        __m512i codes[4];
        for (uint32_t k = 0; k < 4; k++)
            codes[k] = codes16(x + i + 16 * k, left.inverse);
        __m512i bytes = _mm512_permutexvar_epi32(
            order, _mm512_packs_epi16(_mm512_packs_epi32(codes[0], codes[1]),
                                      _mm512_packs_epi32(codes[2], codes[3])));
        if (_mm512_cmpgt_epu8_mask(_mm512_abs_epi8(bytes), reach)) {
            to = put_escaping(to, table, stage, i);
            for (uint32_t k = 0; k < 4; k++)
                codes[k] = load_codes(stage, i + 16 * k);
        } else {
            gc_fetch_next(stage, i);
            gc_fetch_next(stage, i + 32);
            put_symbols(&to, look_up(joined, indices_of(bytes)));
        }
        for (uint32_t k = 0; keeps && k < 4; k++)
            write_rest(&left, x, i + 16 * k, codes[k], 0xFFFF, streams);
    }
    *rest = left;
    return gc_end(&to, out);
}

GC_AVX512_INLINE int put_whole(gc_entropy_stage *stage, const gc_entropy_table *table,
                               uint32_t code_nbytes, uint8_t *codes, size_t *needed, int keeps,
                               int streams)
{
    uint8_t front[GC_HALF_NBYTES], back[GC_HALF_NBYTES];
    rest_writer rest = open_rest(&stage->rest);
    size_t head = write_half(table, stage, 0, front, &rest, keeps, streams),
           tail = write_half(table, stage, GC_STREAM_NUMEL / 2, back, &rest, keeps, streams);
    stage->rest.left = (double)_mm512_reduce_add_ps(rest.left);
    stage->rest.is_written = 1;
    return gc_join_halves(front, head, back, tail, code_nbytes, codes, needed);
}

GC_AVX512 static int put_stream(gc_entropy_stage *stage, const gc_entropy_table *table,
                                uint32_t numel, uint32_t code_nbytes, uint8_t *codes,
                                size_t *needed)
{
    if (numel < GC_STREAM_NUMEL) {
        for (uint32_t i = 0; i < numel; i += 64)
            make_pairs(stage, i, _mm512_set1_ps(stage->rest.inverse), table->top);
        return gc_put_stream(stage, table, numel, code_nbytes, codes, needed, gc_write_pairs);
    }
    if (!stage->rest.out)
        return put_whole(stage, table, code_nbytes, codes, needed, 0, 0);
    if (rest_streams(&stage->rest))
        return put_whole(stage, table, code_nbytes, codes, needed, 1, 1);
    return put_whole(stage, table, code_nbytes, codes, needed, 1, 0);
}

/* By codes that put_stream has left, or zeros. */
GC_AVX512 static void rest(gc_entropy_stage *stage, uint32_t numel)
{
    rest_writer to = open_rest(&stage->rest);
    int streams = rest_streams(&stage->rest);
    for (uint32_t i = 0; i < numel; i += 16) {
        uint32_t left_over = numel - i;
        __mmask16 valid = left_over < 16 ? (__mmask16)((1u << left_over) - 1) : (__mmask16)0xFFFF;
        write_rest(&to, stage->block.x, i, load_codes(stage, i), valid, streams && valid == 0xFFFF);
    }
    stage->rest.left = (double)_mm512_reduce_add_ps(to.left);
}

void gc_entropy_encode_avx512(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_entropy_encoder tier = {gc_take_squares_avx512, count, gc_weigh_avx2,
                                            put_stream, rest};
    gc_encode_streams(job, segment, &tier);
}
#endif
