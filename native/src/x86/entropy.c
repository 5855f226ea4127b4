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

/* |codes| of 32 elements in any order, those above 8 as 8. Saturated codes stay above it. */
GC_AVX2_INLINE __m256i magnitudes32(const float *x, __m256 inverse)
{
    __m256i bytes = _mm256_packs_epi16(
        _mm256_packs_epi32(codes8(x, inverse), codes8(x + 8, inverse)),
        _mm256_packs_epi32(codes8(x + 16, inverse), codes8(x + 24, inverse)));
    return _mm256_min_epu8(_mm256_abs_epi8(bytes), _mm256_set1_epi8(GC_COUNTED_CODES - 1));
}

/* Two |codes| share a byte, a nibble each, which holds 15. Elements past the end, up to a multiple
 * of 32, are 0, and taken off again. */
GC_AVX2 static void count(const gc_entropy_stage *stage, uint32_t numel, uint32_t sampled,
                          float inverse, uint32_t counts[GC_COUNTED_CODES])
{
    enum { MOST = 15 * 32 };
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i ones[4] = {/* by |code|: 1 in the nibble of 2 k or of 2 k + 1 */
                             _mm256_setr_epi64x(0x1001, 0, 0x1001, 0),
                             _mm256_setr_epi64x(0x10010000, 0, 0x10010000, 0),
                             _mm256_setr_epi64x(0x100100000000, 0, 0x100100000000, 0),
                             _mm256_setr_epi64x(0x1001000000000000, 0, 0x1001000000000000, 0)};
    __m256i seen[GC_COUNTED_CODES - 1]; /* 4096 / 32 = 128 at most in a byte */
#pragma GCC unroll 8
    for (int k = 0; k < GC_COUNTED_CODES - 1; k++)
        seen[k] = _mm256_setzero_si256();
    uint32_t rest = 0, past = (0 - numel) % 32,
             every = sampled < GC_SAMPLE_EVERY ? GC_SAMPLE_EVERY : MOST;
    sampled = sampled < MOST ? sampled : MOST;
    for (uint32_t first = 0; first < numel; first += every) {
        uint32_t end = numel - first < sampled ? numel : first + sampled;
        __m256i pairs[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                            _mm256_setzero_si256()};
        for (uint32_t i = first; i < end; i += 32) {
            __m256i codes = magnitudes32(stage->block.x + i, by);
            rest += 32;
            for (int k = 0; k < 4; k++)
                pairs[k] = _mm256_add_epi8(pairs[k], _mm256_shuffle_epi8(ones[k], codes));
        }
        for (int k = 0; k < 4; k++) {
            seen[2 * k] = _mm256_add_epi8(seen[2 * k], _mm256_and_si256(pairs[k], low));
            seen[2 * k + 1] = _mm256_add_epi8(
                seen[2 * k + 1], _mm256_and_si256(_mm256_srli_epi16(pairs[k], 4), low));
        }
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

/* Thirty-two codes of sixteen bits as bytes in order. */
GC_AVX2_INLINE __m256i bytes_of(const __m256i codes[4])
{
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]),
                                       _mm256_packs_epi32(codes[2], codes[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Codes and pairs of elements [i, i + 32), and which escape a table that reaches to `top`. */
GC_AVX2 static void make_pairs(gc_entropy_stage *stage, uint32_t i, float inverse, int top)
{
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i none = _mm256_set1_epi8(-8), most = _mm256_set1_epi8(GC_TABLE_TOP),
                  eight = _mm256_set1_epi8(8), shift = _mm256_set1_epi16(0x0110),
                  reach = _mm256_set1_epi8((char)top);
    const float *x = stage->block.x + i;
    const __m256i codes[4] = {codes8(x, by), codes8(x + 8, by), codes8(x + 16, by),
                              codes8(x + 24, by)};
    for (int k = 0; k < 4; k += 2) {
        __m256i both = _mm256_packs_epi32(codes[k], codes[k + 1]);
        both = _mm256_max_epi16(both, _mm256_set1_epi16(-GC_LARGEST_CODE));
        both = _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
        _mm256_storeu_si256((__m256i *)(stage->codes + i + 8 * k), both);
    }
    __m256i bytes = bytes_of(codes);
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

typedef struct {
    const float *x;
    float *out;
    __m256 inverse, scale, decay, left;
} rest_writer;

GC_AVX2_INLINE rest_writer open_rest(const gc_entropy_stage *stage)
{
    const gc_entropy_rest *to = &stage->rest;
    return (rest_writer){stage->block.x,
                         to->out,
                         _mm256_set1_ps(to->inverse),
                         _mm256_set1_ps(to->scale),
                         _mm256_set1_ps(to->decay),
                         _mm256_setzero_ps()};
}

/* Of eight elements, whose codes are within the limits. */
GC_AVX2_INLINE void write_rest(rest_writer *to, uint32_t i, __m256i codes, int streams)
{
    __m256 q = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), to->scale),
           left = _mm256_sub_ps(_mm256_loadu_ps(to->x + i), q),
           kept = _mm256_mul_ps(left, to->decay);
    to->left = _mm256_add_ps(to->left, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), left));
    if (streams)
        _mm256_stream_ps(to->out + i, kept);
    else
        _mm256_storeu_ps(to->out + i, kept);
}

/* Of eight elements with any codes. */
GC_AVX2_INLINE void write_any_rest(rest_writer *to, uint32_t i, int streams)
{
    const __m256i most = _mm256_set1_epi32(GC_LARGEST_CODE);
    __m256i codes = _mm256_min_epi32(codes8(to->x + i, to->inverse), most);
    write_rest(to, i, _mm256_max_epi32(codes, _mm256_set1_epi32(-GC_LARGEST_CODE)), streams);
}

GC_AVX2_INLINE int rest_streams(const gc_entropy_rest *to)
{
    return to->streams && (uintptr_t)to->out % sizeof(__m256) == 0;
}

GC_AVX2 static void rest(gc_entropy_stage *stage, uint32_t numel)
{
    gc_entropy_rest *to = &stage->rest;
    rest_writer writer = open_rest(stage);
    int streams = rest_streams(to);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8)
        write_any_rest(&writer, i, streams);
    to->left = gc_sum8(writer.left);
    for (; i < numel; i++) {
        float x = stage->block.x[i];
        float left = x - (float)gc_entropy_code(x, to->inverse) * to->scale;
        to->out[i] = to->decay * left;
        to->left += left < 0 ? -left : left;
    }
}

#define GC_BMI2 __attribute__((target("avx2,fma,f16c,sse4.2,bmi2")))
#define GC_BMI2_INLINE static inline GC_ALWAYS_INLINE GC_BMI2

/* Four quads: at most 88 bits, seldom above 56. */
GC_BMI2_INLINE void put_quads(gc_writer *to, const uint32_t *table, const uint16_t *quads)
{
    enum { LENGTH = 127 };
    uint64_t a = table[quads[0]], b = table[quads[1]], c = table[quads[2]], d = table[quads[3]];
    uint64_t low = a >> 7 | b >> 7 << (a & 63), high = c >> 7 | d >> 7 << (c & 63);
    unsigned first = (unsigned)(a + b) & LENGTH, second = (unsigned)(c + d) & LENGTH;
    if (first + second <= 56) {
        gc_put(to, low | high << (first & 63), first + second);
    } else {
        gc_put(to, low, first);
        gc_flush(to);
        gc_put(to, high, second);
    }
    gc_flush(to);
}

/* Indices of eight quads. */
GC_AVX2_INLINE void store_quads(uint16_t *to, __m256i bytes)
{
    const __m256i sevens = _mm256_set1_epi16(0x0107), more = _mm256_set1_epi32(1 << 16 | 49);
    bytes = _mm256_add_epi8(bytes, _mm256_set1_epi8(GC_QUAD_TOP));
    __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, sevens), more);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(quads),
                                                     _mm256_extracti128_si256(quads, 1)));
}

/* Write half of a whole stream and what is left of x, 32 elements at a time: memory takes the one,
 * and fetches as much of the next stream, while bits are joined. */
GC_BMI2_INLINE size_t write_half(const gc_entropy_table *table, gc_entropy_stage *stage,
                                 uint32_t first, uint8_t *out, rest_writer *rest, int keeps,
                                 int streams)
{
    gc_writer to = {0, 0, out};
    rest_writer left = *rest;
    uint16_t quads[8];
    const __m256i reach = _mm256_set1_epi8(
        (char)(table->top < GC_QUAD_TOP ? table->top : GC_QUAD_TOP));
    for (uint32_t i = first; i < first + GC_STREAM_NUMEL / 2; i += 32) {
        __m256i codes[4];
        for (uint32_t k = 0; k < 4; k++)
            codes[k] = codes8(left.x + i + 8 * k, left.inverse);
        __m256i bytes = bytes_of(codes), far = _mm256_subs_epu8(_mm256_abs_epi8(bytes), reach);
        if (_mm256_testz_si256(far, far)) {
            gc_fetch_next(stage, i);
            store_quads(quads, bytes);
            put_quads(&to, table->quads, quads);
            put_quads(&to, table->quads, quads + 4);
            for (uint32_t k = 0; keeps && k < 4; k++)
                write_rest(&left, i + 8 * k, codes[k], streams);
        } else {
            make_pairs(stage, i, stage->rest.inverse, table->top);
            gc_put_pairs(&to, table, stage, i / 2, i / 2 + 16);
            for (uint32_t k = 0; keeps && k < 4; k++)
                write_any_rest(&left, i + 8 * k, streams);
        }
    }
    *rest = left;
    return gc_end(&to, out);
}

GC_BMI2_INLINE int put_whole(gc_entropy_stage *stage, const gc_entropy_table *table,
                             uint32_t code_nbytes, uint8_t *codes, size_t *needed, int keeps,
                             int streams)
{
    uint8_t front[GC_HALF_NBYTES], back[GC_HALF_NBYTES];
    rest_writer rest = open_rest(stage);
    size_t head = write_half(table, stage, 0, front, &rest, keeps, streams),
           tail = write_half(table, stage, GC_STREAM_NUMEL / 2, back, &rest, keeps, streams);
    stage->rest.left = gc_sum8(rest.left);
    stage->rest.is_written = 1;
    return gc_join_halves(front, head, back, tail, code_nbytes, codes, needed);
}

GC_BMI2 static int put_stream(gc_entropy_stage *stage, const gc_entropy_table *table,
                              uint32_t numel, uint32_t code_nbytes, uint8_t *codes, size_t *needed)
{
    if (numel < GC_STREAM_NUMEL || !table->is_narrow) {
        for (uint32_t i = 0; i < numel; i += 32)
            make_pairs(stage, i, stage->rest.inverse, table->top);
        return gc_put_stream(stage, table, numel, code_nbytes, codes, needed, gc_write_pairs);
    }
    if (!stage->rest.out)
        return put_whole(stage, table, code_nbytes, codes, needed, 0, 0);
    if (rest_streams(&stage->rest))
        return put_whole(stage, table, code_nbytes, codes, needed, 1, 1);
    return put_whole(stage, table, code_nbytes, codes, needed, 1, 0);
}

void gc_entropy_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_entropy_encoder tier = {gc_take_squares_avx2, count, gc_weigh_avx2, put_stream,
                                            rest};
    gc_encode_streams(job, segment, &tier);
}

/* ---- decoding -------------------------------------------------------------------------------- */
GC_BMI2 static void read_bmi2(const gc_stream *one, const gc_stream *two, gc_stream_codes *into)
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
