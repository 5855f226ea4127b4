/* crc32c_stretches.h - CRC-32C by an instruction that takes eight bytes: a template.
 *
 * The including file defines
 *   GC_CRC_TARGET            attributes of the functions
 *   GC_CRC_WORD(crc, word)   the register after eight more bytes
 *   GC_CRC_BYTE(crc, byte)   and after one
 *   GC_CRC_NAME              storage class, type and name of the kernel.
 * The instruction has a latency of two or three cycles, so three stretches of STRETCH_NBYTES are
 * run side by side and joined: a CRC register followed by n more bytes is the register times x^(8n)
 * modulo the polynomial.
 */
#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* reflected: bit 31 is x^0 */

enum { STRETCH_NBYTES = 4096 };
/* x^(8 * STRETCH_NBYTES) and x^(16 * STRETCH_NBYTES) modulo the polynomial, by repeated squaring of
 * x. */
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
GC_CRC_TARGET static uint32_t three_stretches(uint32_t crc, const uint8_t *data)
{
    uint32_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < STRETCH_NBYTES; i += 8) {
        a = GC_CRC_WORD(a, word_at(data + i));
        b = GC_CRC_WORD(b, word_at(data + STRETCH_NBYTES + i));
        c = GC_CRC_WORD(c, word_at(data + 2 * STRETCH_NBYTES + i));
    }
    return multiply(a, SHIFT_TWO) ^ multiply(b, SHIFT_ONE) ^ c;
}

GC_CRC_NAME(uint32_t crc, const uint8_t *data, size_t data_nbytes)
{
    crc = ~crc;
    for (; data_nbytes >= 3 * STRETCH_NBYTES;
         data += 3 * STRETCH_NBYTES, data_nbytes -= 3 * STRETCH_NBYTES)
        crc = three_stretches(crc, data);
    for (; data_nbytes >= 8; data += 8, data_nbytes -= 8)
        crc = GC_CRC_WORD(crc, word_at(data));
    for (; data_nbytes; data++, data_nbytes--)
        crc = GC_CRC_BYTE(crc, *data);
    return ~crc;
}
