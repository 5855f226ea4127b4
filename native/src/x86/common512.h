/* common512.h - what the avx512 kernels share. */
#ifndef GC_X86_COMMON512_H
#define GC_X86_COMMON512_H

#include "common.h"

#ifdef GC_EMULATE_AVX512
#include "avx512_emulated.h"
#else
#define GC_AVX512   \
    __attribute__(( \
        target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,avx2,fma,f16c,sse4.2,popcnt")))
#endif
#define GC_AVX512_INLINE static inline GC_ALWAYS_INLINE GC_AVX512

GC_AVX512_INLINE __m512 gc_load16(const void *src, int dtype, uint64_t i)
{
    if (dtype == GC_F32)
        return _mm512_loadu_ps((const float *)src + i);
    __m256i h = _mm256_loadu_si256((const __m256i *)((const uint16_t *)src + i));
    if (dtype == GC_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    return _mm512_cvtph_ps(h);
}

enum { GC_PREFETCH_NUMEL = 1024 };

/* Return x = g + r of sixteen elements, and g; `residual` may be NULL. What follows is fetched. */
GC_AVX512_INLINE __m512 gc_take16(const void *src, int dtype, uint64_t data, const float *residual,
                                  uint32_t i, __m512 *g)
{
    *g = gc_load16(src, dtype, data + i);
    gc_prefetch(src, dtype, data + i + GC_PREFETCH_NUMEL);
    if (!residual)
        return *g;
    gc_prefetch(residual, GC_F32, i + GC_PREFETCH_NUMEL);
    return _mm512_add_ps(*g, _mm512_loadu_ps(residual + i));
}

GC_AVX512_INLINE __m512i gc_abs16(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(GC_ABS_MASK));
}

/* Sum of sixteen lanes by the tree that gc_lanes_total pins. */
GC_AVX512_INLINE double gc_total16_avx512(const __m512d lanes[2])
{
    __m512d eight = _mm512_add_pd(lanes[0], lanes[1]);
    __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

#endif
