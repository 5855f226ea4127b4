/* avx512_emulated.h - AVX-512 intrinsics for processors with AVX2 only, to test the kernels of that
 * tier there: from SIMDe (Debian: libsimde-dev), and below those that its version 0.7.4 lacks.
 * `run.sh avx512` compiles with it, and so does
 * CFLAGS="-DGC_EMULATE_AVX512 -Itests/native -mavx2 -mfma -mf16c -mbmi2" make build. */
#ifndef GC_TEST_AVX512_EMULATED_H
#define GC_TEST_AVX512_EMULATED_H

#include <immintrin.h> /* first: SIMDe's names replace these */

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

/* The kernels' own attribute would let the compiler emit AVX-512 itself. */
#define GC_AVX512 __attribute__((target("avx2,fma,f16c,bmi2,sse4.2,popcnt")))
#define EMULATED static inline GC_AVX512

/* Define NAME(x): RESULT from each of the halves of x, each of type HALF, by ONE. */
#define BY_HALVES(name, result, half_t, given, first, second, one) \
    EMULATED result name(given x)                                  \
    {                                                              \
        union {                                                    \
            half_t half[2];                                        \
            result whole;                                          \
        } to = {{one(first), one(second)}};                        \
        return to.whole;                                           \
    }

EMULATED __m256i high256(simde__m512i x) { return simde_mm512_extracti64x4_epi64(x, 1); }
EMULATED __m256i low256(simde__m512i x) { return simde_mm512_castsi512_si256(x); }
EMULATED __m256 high256f(simde__m512 x)
{
    return _mm256_castsi256_ps(high256(simde_mm512_castps_si512(x)));
}
EMULATED __m256 low256f(simde__m512 x) { return simde_mm512_castps512_ps256(x); }

BY_HALVES(emulated_cvtps_pd, simde__m512d, __m256d, __m256, _mm256_castps256_ps128(x),
          _mm256_extractf128_ps(x, 1), _mm256_cvtps_pd)
BY_HALVES(emulated_cvtph_ps, simde__m512, __m256, __m256i, _mm256_castsi256_si128(x),
          _mm256_extracti128_si256(x, 1), _mm256_cvtph_ps)
BY_HALVES(emulated_cvtepu16_epi32, simde__m512i, __m256i, __m256i, _mm256_castsi256_si128(x),
          _mm256_extracti128_si256(x, 1), _mm256_cvtepu16_epi32)
BY_HALVES(emulated_cvtepu8_epi16, simde__m512i, __m256i, __m256i, _mm256_castsi256_si128(x),
          _mm256_extracti128_si256(x, 1), _mm256_cvtepu8_epi16)
BY_HALVES(emulated_cvtepi16_epi32, simde__m512i, __m256i, __m256i, _mm256_castsi256_si128(x),
          _mm256_extracti128_si256(x, 1), _mm256_cvtepi16_epi32)
BY_HALVES(emulated_cvtepi32_ps, simde__m512, __m256, simde__m512i, low256(x), high256(x),
          _mm256_cvtepi32_ps)
BY_HALVES(emulated_cvtps_epi32, simde__m512i, __m256i, simde__m512, low256f(x), high256f(x),
          _mm256_cvtps_epi32)
BY_HALVES(emulated_cvttps_epi32, simde__m512i, __m256i, simde__m512, low256f(x), high256f(x),
          _mm256_cvttps_epi32)

EMULATED simde__m512i emulated_shuffle_epi32(simde__m512i x, int order)
{
    uint32_t from[16], to[16];
    simde_mm512_storeu_si512(from, x);
    for (int i = 0; i < 16; i++)
        to[i] = from[(i & ~3) + ((order >> (2 * (i & 3))) & 3)];
    return simde_mm512_loadu_si512(to);
}

EMULATED simde__m512i emulated_mask_shuffle_epi32(simde__m512i otherwise, simde__mmask16 mask,
                                                  simde__m512i x, int order)
{
    return simde_mm512_mask_blend_epi32(mask, otherwise, emulated_shuffle_epi32(x, order));
}

EMULATED void emulated_mask_storeu_ps(void *dst, simde__mmask16 mask, simde__m512 x)
{
    float from[16];
    simde_mm512_storeu_ps(from, x);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            ((float *)dst)[i] = from[i];
}

EMULATED simde__mmask32 emulated_cmplt_epu16_mask(simde__m512i a, simde__m512i b)
{
    uint16_t x[32], y[32];
    simde_mm512_storeu_si512(x, a);
    simde_mm512_storeu_si512(y, b);
    simde__mmask32 mask = 0;
    for (int i = 0; i < 32; i++)
        mask |= (simde__mmask32)(x[i] < y[i]) << i;
    return mask;
}

EMULATED simde__mmask32 emulated_kunpackw(simde__mmask32 high, simde__mmask32 low)
{
    return high << 16 | (low & 0xFFFF);
}

/* In the order of the sums of gcc's and clang's. */
EMULATED float emulated_reduce_add_ps(simde__m512 x)
{
    float sums[16];
    simde_mm512_storeu_ps(sums, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

EMULATED long long emulated_reduce_add_epi64(simde__m512i x)
{
    long long of[8], sum = 0;
    simde_mm512_storeu_si512(of, x);
    for (int i = 0; i < 8; i++)
        sum += of[i];
    return sum;
}

EMULATED unsigned emulated_reduce_max_epu32(simde__m512i x)
{
    uint32_t of[16], largest = 0;
    simde_mm512_storeu_si512(of, x);
    for (int i = 0; i < 16; i++)
        largest = of[i] > largest ? of[i] : largest;
    return largest;
}

/* A stream faults where its address is not aligned. */
EMULATED void emulated_stream_ps(void *dst, simde__m512 x)
{
    if ((uintptr_t)dst % sizeof x)
        __builtin_trap();
    simde_mm512_storeu_ps(dst, x);
}

#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 emulated_cvtepu8_epi16
#define _mm512_cvtepi16_epi32 emulated_cvtepi16_epi32
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvttps_epi32 emulated_cvttps_epi32
#define _mm512_extractf32x8_ps(x, half) ((half) ? high256f(x) : low256f(x))
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32 emulated_shuffle_epi32
#undef _mm512_mask_shuffle_epi32
#define _mm512_mask_shuffle_epi32 emulated_mask_shuffle_epi32
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#undef _mm512_cmplt_epu16_mask
#define _mm512_cmplt_epu16_mask emulated_cmplt_epu16_mask
#define _mm512_kunpackw emulated_kunpackw
#define _mm512_reduce_add_ps emulated_reduce_add_ps
#define _mm512_reduce_add_epi64 emulated_reduce_add_epi64
#define _mm512_reduce_max_epu32 emulated_reduce_max_epu32
#define _mm512_stream_ps emulated_stream_ps

#endif
