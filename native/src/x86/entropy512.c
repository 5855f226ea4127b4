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

GC_AVX512 static void quantize(gc_entropy_stage *stage, uint32_t numel, float inverse, int top)
{
    const __m512 by = _mm512_set1_ps(inverse);
    const __m512i none = _mm512_set1_epi8(-8), eight = _mm512_set1_epi8(8),
                  shift = _mm512_set1_epi16(0x0110), reach = _mm512_set1_epi8((char)top),
                  most = _mm512_set1_epi8(GC_TABLE_TOP),
                  order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (uint32_t i = 0; i < numel; i += 64) {
        __m512i low = codes32(stage->block.x + i, by), high = codes32(stage->block.x + i + 32, by);
        _mm512_storeu_si512(stage->codes + i, low);
        _mm512_storeu_si512(stage->codes + i + 32, high);
        __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packs_epi16(low, high));
        __m512i magnitudes = _mm512_abs_epi8(bytes);
        __mmask64 far = _mm512_cmpgt_epu8_mask(magnitudes, reach);
        uint32_t escapes = (uint32_t)_pext_u64(far | far >> 1, 0x5555555555555555u);
        stage->escapes[i / 32] = (uint16_t)escapes;
        stage->escapes[i / 32 + 1] = (uint16_t)(escapes >> 16);
        /* what has no symbol in any table */
        __mmask64 above = _mm512_cmpgt_epu8_mask(magnitudes, most);
        bytes = _mm512_mask_blend_epi8(above, bytes, none);
        __m512i pairs = _mm512_maddubs_epi16(_mm512_add_epi8(bytes, eight), shift);
        _mm256_storeu_si256((__m256i *)(stage->pairs + i / 2), _mm512_cvtepi16_epi8(pairs));
    }
}

/* The symbols of thirty-two pairs, as gc_entropy_table.joined. */
GC_AVX512_INLINE __m512i look_up(const __m512i table[8], __m512i indices)
{
    __mmask32 second = _mm512_movepi16_mask(_mm512_slli_epi16(indices, 9)),
              upper = _mm512_movepi16_mask(_mm512_slli_epi16(indices, 8));
    __m512i quarters[4];
    for (int k = 0; k < 4; k++)
        quarters[k] = _mm512_permutex2var_epi16(table[2 * k], indices, table[2 * k + 1]);
    return _mm512_mask_blend_epi16(upper,
                                   _mm512_mask_blend_epi16(second, quarters[0], quarters[1]),
                                   _mm512_mask_blend_epi16(second, quarters[2], quarters[3]));
}

/* Eight times four symbols in a row. */
GC_AVX512_INLINE void join_symbols(__m512i symbols, uint64_t bits[8], uint64_t lengths[8])
{
    const __m512i low16 = _mm512_set1_epi32(0xFFFF), low32 = _mm512_set1_epi64(0xFFFFFFFF);
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
    _mm512_storeu_si512(bits, code);
    _mm512_storeu_si512(lengths, length);
}

/* Write thirty-two pairs of which some escape. */
__attribute__((noinline)) GC_AVX512 static gc_writer
put_escaping32(gc_writer to, const gc_entropy_table *table, const gc_entropy_stage *stage,
               uint32_t first)
{
    gc_put_pairs(&to, table, stage, first, first + 32);
    return to;
}

/* gc_write_pairs, thirty-two at a time. */
GC_AVX512 static size_t write_pairs(const gc_entropy_table *table, const gc_entropy_stage *stage,
                                    uint32_t first, uint32_t end, uint8_t *out)
{
    gc_writer to = {0, 0, out};
    __m512i joined[8];
    for (int k = 0; k < 8; k++)
        joined[k] = _mm512_loadu_si512(table->joined + 32 * k);
    for (; first % GC_PUT_PAIRS == 0 && end - first >= 32; first += 32) {
        if (stage->escapes[first / GC_PUT_PAIRS] | stage->escapes[first / GC_PUT_PAIRS + 1]) {
            to = put_escaping32(to, table, stage, first);
            continue;
        }
        gc_fetch_next(stage, 2 * first);
        gc_fetch_next(stage, 2 * first + 32);
        uint64_t bits[8], lengths[8];
        __m256i pairs = _mm256_loadu_si256((const __m256i *)(stage->pairs + first));
        join_symbols(look_up(joined, _mm512_cvtepu8_epi16(pairs)), bits, lengths);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 8; k++) {
            gc_put(&to, bits[k], (unsigned)lengths[k]);
            gc_flush(&to);
        }
    }
    gc_put_pairs(&to, table, stage, first, end);
    return gc_end(&to, out);
}

GC_AVX512 static int put_stream(gc_entropy_stage *stage, const gc_entropy_table *table,
                                uint32_t numel, uint32_t code_nbytes, uint8_t *codes,
                                size_t *needed)
{
    quantize(stage, numel, stage->rest.inverse, table->top);
    return gc_put_stream(stage, table, numel, code_nbytes, codes, needed, write_pairs);
}

GC_AVX512 static void rest(gc_entropy_stage *stage, uint32_t numel)
{
    float *out = stage->rest.out;
    const __m512 scales = _mm512_set1_ps(stage->rest.scale),
                 keep = _mm512_set1_ps(stage->rest.decay);
    __m512 all = _mm512_setzero_ps();
    int streams = stage->rest.streams && (uintptr_t)out % sizeof(__m512) == 0;
    for (uint32_t i = 0; i < numel; i += 16) {
        uint32_t left_over = numel - i;
        __mmask16 valid = left_over < 16 ? (__mmask16)((1u << left_over) - 1) : (__mmask16)0xFFFF;
        __m512i codes = _mm512_cvtepi16_epi32(
            _mm256_loadu_si256((const __m256i *)(stage->codes + i)));
        __m512 q = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scales);
        __m512 left = _mm512_maskz_sub_ps(valid, _mm512_loadu_ps(stage->block.x + i), q);
        all = _mm512_add_ps(all, _mm512_abs_ps(left));
        left = _mm512_mul_ps(left, keep);
        if (streams && valid == 0xFFFF)
            _mm512_stream_ps(out + i, left);
        else
            _mm512_mask_storeu_ps(out + i, valid, left);
    }
    stage->rest.left = (double)_mm512_reduce_add_ps(all);
}

void gc_entropy_encode_avx512(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_entropy_encoder tier = {gc_take_squares_avx512, count, gc_weigh_avx2,
                                            put_stream, rest};
    gc_encode_streams(job, segment, &tier);
}
#endif
