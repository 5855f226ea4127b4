/* common.h - what the avx2 kernels share: typed loads of eight elements, stores of decoded
 * values. */
#ifndef GC_X86_COMMON_H
#define GC_X86_COMMON_H

#include <immintrin.h>

#include "pieces.h"

#define GC_AVX2 __attribute__((target("avx2,fma,f16c,sse4.2")))
#define GC_AVX2_INLINE static inline GC_ALWAYS_INLINE GC_AVX2

/* ---- sources --------------------------------------------------------------------------------- */
GC_AVX2_INLINE __m256 gc_load8(const void *src, int dtype, uint64_t i)
{
    if (dtype == GC_F32)
        return _mm256_loadu_ps((const float *)src + i);
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)src + i));
    if (dtype == GC_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    return _mm256_cvtph_ps(h);
}

/* Ask for the line that holds element i, which need not exist. */
GC_AVX2_INLINE void gc_prefetch(const void *src, int dtype, uint64_t i)
{
    _mm_prefetch((const char *)((uintptr_t)src + i * (dtype == GC_F32 ? 4 : 2)), _MM_HINT_T0);
}

GC_AVX2_INLINE __m256i gc_abs8(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(GC_ABS_MASK));
}

/* Largest of eight non-negative integers. */
GC_AVX2_INLINE uint32_t gc_max8(__m256i v)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

/* Sum of eight lanes in float64. */
GC_AVX2_INLINE double gc_sum8(__m256 v)
{
    __m256d d = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                              _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(d), _mm256_extractf128_pd(d, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

/* Sum of sixteen lanes, lane 4j + i in element i of vector j, by the tree that gc_lanes_total
 * pins. */
GC_AVX2_INLINE double gc_total16(const __m256d lanes[4])
{
    __m256d four = _mm256_add_pd(_mm256_add_pd(lanes[0], lanes[2]),
                                 _mm256_add_pd(lanes[1], lanes[3]));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

/* Eight finite values as bf16, rounded to nearest even. */
GC_AVX2_INLINE __m128i gc_to_bf16x8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x),
            odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i h = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

/* ---- decoded values -------------------------------------------------------------------------- */
/* Write stage[0 .. piece->numel) * factor to the piece's place in the output; 0 if one of them is
 * not finite there. */
int gc_store_stage(const gc_decode_job *job, const gc_segment *segment, const gc_piece *piece,
                   const float *stage, float factor);

/* Write eight finite values. Streaming stores need an address that is a multiple of the vector. */
GC_AVX2_INLINE void gc_write8(void *out, int dtype, uint64_t i, __m256 x, int stream)
{
    if (dtype == GC_F32) {
        if (stream)
            _mm256_stream_ps((float *)out + i, x);
        else
            _mm256_storeu_ps((float *)out + i, x);
        return;
    }
    __m128i h = dtype == GC_BF16
                    ? gc_to_bf16x8(x)
                    : _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (stream)
        _mm_stream_si128((__m128i *)((uint16_t *)out + i), h);
    else
        _mm_storeu_si128((__m128i *)((uint16_t *)out + i), h);
}

/* Run `body(..., dtype, stream)` with both constant. */
#define GC_BY_OUTPUT(job, streams, body, ...)                                         \
    do {                                                                              \
        if (streams)                                                                  \
            GC_BY_DTYPE((job)->out_dtype, body(__VA_ARGS__, GC_F32, 1),               \
                        body(__VA_ARGS__, GC_BF16, 1), body(__VA_ARGS__, GC_F16, 1)); \
        else                                                                          \
            GC_BY_DTYPE((job)->out_dtype, body(__VA_ARGS__, GC_F32, 0),               \
                        body(__VA_ARGS__, GC_BF16, 0), body(__VA_ARGS__, GC_F16, 0)); \
    } while (0)

/* ---- sums of ternary codes ------------------------------------------------------------------- */
enum { GC_BYTE_SUMS_PAYLOADS = 127, GC_SUMS_BLOCK_NUMEL = 128 };

/* Sums of the codes (0, 1, 2) of at most GC_BYTE_SUMS_PAYLOADS payloads, a byte an element: `numel`
 * elements from the code byte `first_byte` of the segment on, rounded up to blocks of
 * GC_SUMS_BLOCK_NUMEL. */
void gc_byte_sums(const gc_decode_job *job, const gc_segment *segment, size_t first_byte,
                  uint32_t numel, uint8_t *sums);

#endif
