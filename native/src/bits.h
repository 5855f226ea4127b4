/* bits.h - appending staged codes to a bit stream whose groups may end inside a byte. */
#ifndef GC_BITS_H
#define GC_BITS_H

#include "numeric.h"

/* Write `bits` staged bits at bit `position` of the codes; what is above them in the last byte
 * becomes 0. Bits of earlier groups in the first byte stay. Bits of the staged bytes above the last
 * are ignored. */
GC_INLINE void gc_put_bits(uint8_t *codes, uint64_t position, const uint8_t *staged, size_t bits)
{
    unsigned offset = (unsigned)(position % 8), above = (unsigned)((offset + bits) % 8);
    size_t nbytes = (offset + bits + 7) / 8;
    uint8_t *out = codes + position / 8;
    if (!bits)
        return;
    if (!offset) {
        memcpy(out, staged, nbytes);
    } else {
        size_t whole = (bits + 7) / 8, i = 0;
        uint64_t carry = out[0] & ((1u << offset) - 1);
        for (; i + 8 <= whole; i += 8) {
            uint64_t word, shifted;
            memcpy(&word, staged + i, 8);
            shifted = word << offset | carry;
            carry = word >> (64 - offset);
            memcpy(out + i, &shifted, 8);
        }
        for (; i < whole; i++) {
            out[i] = (uint8_t)((unsigned)staged[i] << offset | carry);
            carry = (unsigned)staged[i] >> (8 - offset);
        }
        if (nbytes > whole)
            out[whole] = (uint8_t)carry;
    }
    if (above)
        out[nbytes - 1] &= (uint8_t)((1u << above) - 1);
}

#endif
