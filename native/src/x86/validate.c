/* validate.c - ternary codes looked through 128 bytes at a time; what is left over goes to the
 * portable kernel. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

enum { STEP_NBYTES = 128, CODES_PER_BYTE = 4 };

/* Codes that have both bits set, in bit 0 of each; what the shift brings in from the next byte is
 * in other bits. */
GC_AVX2_INLINE __m256i forbidden32(const uint8_t *codes)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)codes);
    return _mm256_and_si256(x, _mm256_srli_epi64(x, 1));
}

GC_AVX2 gc_status gc_ternary_validate_avx2(const uint8_t *codes, uint32_t numel)
{
    const __m256i low_bits = _mm256_set1_epi8(0x55);
    size_t nbytes = numel / CODES_PER_BYTE / STEP_NBYTES * STEP_NBYTES;
    __m256i forbidden = _mm256_setzero_si256();
    for (size_t i = 0; i < nbytes; i += STEP_NBYTES) {
        __m256i a = _mm256_or_si256(forbidden32(codes + i), forbidden32(codes + i + 32));
        __m256i b = _mm256_or_si256(forbidden32(codes + i + 64), forbidden32(codes + i + 96));
        forbidden = _mm256_or_si256(forbidden, _mm256_or_si256(a, b));
    }
    if (!_mm256_testz_si256(forbidden, low_bits))
        return GC_FORBIDDEN_CODE;
    return gc_ternary_validate_portable(codes + nbytes,
                                        numel - (uint32_t)(nbytes * CODES_PER_BYTE));
}
#endif
