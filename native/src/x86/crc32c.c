/* crc32c.c - CRC-32C by the crc32 instruction of SSE4.2.
 *
 * The instruction has a latency of three cycles, so three stretches of STRETCH_NBYTES are run side by side and joined:
 * a CRC register followed by n more bytes is the register times x^(8n) modulo the polynomial.
 */
#include "internal.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#include <string.h>

#if defined(__clang__) && __clang_major__ >= 14 /* there the instruction has a name of its own */
#define GC_SSE42 __attribute__((target("sse4.2,crc32")))
#else
#define GC_SSE42 __attribute__((target("sse4.2")))
#endif
#define POLYNOMIAL 0x82F63B78u /* reflected: bit 31 is x^0 */

enum { STRETCH_NBYTES = 4096 };
/* x^(8 * STRETCH_NBYTES) and x^(16 * STRETCH_NBYTES) modulo the polynomial, by repeated squaring of x. */
#define SHIFT_ONE 0x35D73A62u
#define SHIFT_TWO 0x28461564u

/* Product of two reflected polynomials modulo the polynomial. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        product ^= a & bit ? b : 0;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

GC_INLINE uint64_t word_at(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* The register after three stretches, from the register before them. */
GC_SSE42 static uint32_t three_stretches(uint32_t crc, const uint8_t *data)
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < STRETCH_NBYTES; i += 8) {
        a = _mm_crc32_u64(a, word_at(data + i));
        b = _mm_crc32_u64(b, word_at(data + STRETCH_NBYTES + i));
        c = _mm_crc32_u64(c, word_at(data + 2 * STRETCH_NBYTES + i));
    }
    return multiply((uint32_t)a, SHIFT_TWO) ^ multiply((uint32_t)b, SHIFT_ONE) ^ (uint32_t)c;
}

GC_SSE42 uint32_t gc_crc32c_avx2(uint32_t crc, const uint8_t *data, size_t data_nbytes)
{
    crc = ~crc;
    for (; data_nbytes >= 3 * STRETCH_NBYTES; data += 3 * STRETCH_NBYTES, data_nbytes -= 3 * STRETCH_NBYTES)
        crc = three_stretches(crc, data);
    uint64_t wide = crc;
    for (; data_nbytes >= 8; data += 8, data_nbytes -= 8)
        wide = _mm_crc32_u64(wide, word_at(data));
    crc = (uint32_t)wide;
    for (; data_nbytes; data++, data_nbytes--)
        crc = _mm_crc32_u8(crc, *data);
    return ~crc;
}
#endif
