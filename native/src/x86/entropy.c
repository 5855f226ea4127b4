/* entropy.c - streams of entropy-coded codes: codes, their counts and their values in vectors. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "entropy_read.h"
#include "entropy_write.h"

/* ---- encoding -------------------------------------------------------------------------------- */
/* Codes of eight elements before they are cut; rounding is to nearest even. */
GC_AVX2_INLINE __m256i codes8(const float *x, __m256 inverse)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

/* Sixteen codes in order, as gc_entropy_code. */
GC_AVX2_INLINE __m256i codes16(const float *x, __m256 inverse)
{
    __m256i both = _mm256_packs_epi32(codes8(x, inverse), codes8(x + 8, inverse));
    both = _mm256_max_epi16(both, _mm256_set1_epi16(-GC_LARGEST_CODE));
    return _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
}

/* A bit for each of sixteen masks. */
GC_AVX2_INLINE uint32_t pair_bits(__m256i masks)
{
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(masks),
                                    _mm256_extracti128_si256(masks, 1));
    return (uint32_t)_mm_movemask_epi8(bytes);
}

GC_AVX2_INLINE uint32_t total_bytes(__m256i sums)
{
    __m256i four = _mm256_sad_epu8(sums, _mm256_setzero_si256());
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return (uint32_t)(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
}

/* Elements past the end, up to a multiple of 32, are 0, and taken off again. */
GC_AVX2 static void count(const gc_entropy_stage *stage, uint32_t numel, uint32_t sampled,
                          float inverse, uint32_t counts[GC_COUNTED_CODES])
{
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i seen[GC_COUNTED_CODES - 1]; /* 4096 / 32 = 128 at most in a byte */
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++)
        seen[k] = _mm256_setzero_si256();
    uint32_t rest = 0, past = (0 - numel) % 32;
    for (uint32_t i = 0; i < numel; i += 32) {
        if (i % GC_SAMPLE_EVERY >= sampled)
            continue;
        const float *x = stage->block.x + i;
        rest += 32;
        /* in any order: only counts matter. Saturated codes stay above 7. */
        __m256i bytes = _mm256_packs_epi16(
            _mm256_packs_epi32(codes8(x, by), codes8(x + 8, by)),
            _mm256_packs_epi32(codes8(x + 16, by), codes8(x + 24, by)));
        bytes = _mm256_abs_epi8(bytes);
        for (int k = 0; k < GC_COUNTED_CODES - 1; k++)
            seen[k] = _mm256_sub_epi8(seen[k], _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8((char)k)));
    }
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++) {
        counts[k] = total_bytes(seen[k]);
        rest -= counts[k];
    }
    counts[GC_COUNTED_CODES - 1] = rest;
    counts[0] -= past;
}

GC_AVX2 void gc_weigh_avx2(const uint32_t counts[GC_COUNTED_CODES], const uint32_t (*matrix)[16],
                           uint32_t sums[16])
{
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int k = 0; k < GC_COUNTED_CODES; k++) {
        const __m256i *row = (const __m256i *)matrix[k], by = _mm256_set1_epi32((int)counts[k]);
        low = _mm256_add_epi32(low, _mm256_mullo_epi32(by, _mm256_loadu_si256(row)));
        high = _mm256_add_epi32(high, _mm256_mullo_epi32(by, _mm256_loadu_si256(row + 1)));
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 8), high);
}

GC_AVX2 static void quantize(gc_entropy_stage *stage, uint32_t numel, float inverse, int top)
{
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i none = _mm256_set1_epi8(-8), most = _mm256_set1_epi8(GC_TABLE_TOP),
                  eight = _mm256_set1_epi8(8), shift = _mm256_set1_epi16(0x0110),
                  reach = _mm256_set1_epi8((char)top);
    for (uint32_t i = 0; i < numel; i += 32) {
        __m256i low = codes16(stage->block.x + i, by), high = codes16(stage->block.x + i + 16, by);
        _mm256_storeu_si256((__m256i *)(stage->codes + i), low);
        _mm256_storeu_si256((__m256i *)(stage->codes + i + 16), high);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high),
                                                 _MM_SHUFFLE(3, 1, 2, 0));
        __m256i far = _mm256_subs_epu8(_mm256_abs_epi8(bytes), reach); /* 128 of -128 */
        __m256i near = _mm256_cmpeq_epi16(far, _mm256_setzero_si256());
        stage->escapes[i / 32] = (uint16_t)~pair_bits(near);
        __m256i above = _mm256_cmpgt_epi8(bytes, most);
        bytes = _mm256_max_epi8(_mm256_blendv_epi8(bytes, none, above), none);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_add_epi8(bytes, eight), shift);
        __m128i indices = _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                           _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128((__m128i *)(stage->pairs + i / 2), indices);
    }
}

GC_AVX2 static double rest(const gc_entropy_stage *stage, uint32_t numel, float scale, float decay,
                           float *out, int streams)
{
    const __m256 scales = _mm256_set1_ps(scale), keep = _mm256_set1_ps(decay),
                 sign = _mm256_set1_ps(-0.0f);
    __m256 all = _mm256_setzero_ps();
    uint32_t i = 0;
    streams = streams && (uintptr_t)out % sizeof(__m256) == 0;
    for (; i + 8 <= numel; i += 8) {
        __m256i codes = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(stage->codes + i)));
        __m256 q = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scales);
        __m256 left = _mm256_sub_ps(_mm256_loadu_ps(stage->block.x + i), q);
        all = _mm256_add_ps(all, _mm256_andnot_ps(sign, left));
        left = _mm256_mul_ps(left, keep);
        if (streams)
            _mm256_stream_ps(out + i, left);
        else
            _mm256_storeu_ps(out + i, left);
    }
    double sum = gc_sum8(all);
    for (; i < numel; i++) {
        float left = stage->block.x[i] - (float)stage->codes[i] * scale;
        out[i] = decay * left;
        sum += left < 0 ? -left : left;
    }
    return sum;
}

__attribute__((target("avx2,fma,f16c,sse4.2,bmi2"))) static int
put_stream(const gc_entropy_stage *stage, const gc_entropy_table *table, uint32_t numel,
           uint32_t code_nbytes, uint8_t *codes, size_t *needed)
{
    return gc_put_stream(stage, table, numel, code_nbytes, codes, needed, gc_write_pairs);
}

void gc_entropy_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_entropy_encoder tier = {gc_take_squares_avx2, count, gc_weigh_avx2, quantize,
                                            put_stream,           rest};
    gc_encode_streams(job, segment, &tier);
}

/* ---- decoding -------------------------------------------------------------------------------- */
__attribute__((target("avx2,fma,f16c,sse4.2,bmi2"))) static void
read_bmi2(const gc_stream *one, const gc_stream *two, gc_stream_codes *into)
{
    gc_read_streams(one, two, into);
}

GC_AVX2 static void add(float *values, const int8_t *codes, uint32_t numel, float scale,
                        int is_first)
{
    const __m256 scales = _mm256_set1_ps(scale);
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), scales);
        if (!is_first)
            value = _mm256_add_ps(_mm256_loadu_ps(values + i), value);
        _mm256_storeu_ps(values + i, value);
    }
}

static void write_values(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                         uint32_t numel, const float *values, float factor)
{
    gc_piece piece = {.first = first, .numel = numel / 8 * 8};
    if (!gc_store_stage(job, segment, &piece, values, factor))
        piece.numel = 0; /* again, for NaNs that are the same on every tier */
    gc_write_values_portable(job, segment, first + piece.numel, numel - piece.numel,
                             values + piece.numel, factor);
}

GC_AVX2_INLINE void write_codes_body(float *out, uint32_t numel, const int8_t *codes, float scale,
                                     int stream)
{
    const __m256 scales = _mm256_set1_ps(scale);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        gc_write8(out, GC_F32, i, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), scales), stream);
    }
    for (; i < numel; i++)
        out[i] = (float)codes[i] * scale;
}

GC_AVX2 static void write_codes(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                                uint32_t numel, const int8_t *codes, float scale)
{
    gc_piece piece = {.first = first, .numel = numel};
    float *out = (float *)job->out + segment->data + first;
    if (gc_piece_streams(job, segment, &piece))
        write_codes_body(out, numel, codes, scale, 1);
    else
        write_codes_body(out, numel, codes, scale, 0);
}

void gc_entropy_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    static const gc_entropy_decoder tier = {read_bmi2, add, write_values, write_codes};
    gc_decode_streams(job, segment, &tier);
}
#endif
