/* validate.c - checks of received codes and scales. Lanes are checked in lanes.c. */
#include "numeric.h"

gc_status gc_ternary_validate_portable(const uint8_t *codes, uint32_t numel)
{
    const uint64_t low_bits = 0x5555555555555555u;
    size_t full = numel / 4, i = 0;
    uint64_t forbidden = 0; /* bit 0 of a code that has both bits set */
    for (; i + 8 <= full; i += 8) {
        uint64_t word = gc_load_u64(codes + i);
        forbidden |= word & word >> 1 & low_bits;
    }
    for (; i < full; i++)
        forbidden |= codes[i] & codes[i] >> 1 & low_bits;
    unsigned used = 2 * (numel % 4);
    uint8_t last = used ? codes[full] : 0;
    forbidden |= last & last >> 1 & ((1u << used) - 1) & low_bits;
    if (forbidden)
        return GC_FORBIDDEN_CODE;
    return used && last >> used != 0x55 >> used ? GC_BAD_PADDING : GC_OK;
}

gc_status gc_onebit_validate_portable(const uint8_t *codes, uint32_t numel)
{
    return numel % 8 && codes[numel / 8] >> numel % 8 ? GC_BAD_PADDING : GC_OK;
}

gc_status gc_block_validate_portable(const uint8_t *codes, uint32_t numel, unsigned code_bits)
{
    size_t whole = (size_t)numel * code_bits / 8;
    unsigned used = (unsigned)((uint64_t)numel * code_bits % 8), forbidden = 0;
    if (code_bits == 8)
        for (size_t i = 0; i < whole; i++)
            forbidden |= codes[i] == 0xFF;
    else if (code_bits == 4)
        for (size_t i = 0; i < whole; i++)
            forbidden |= (codes[i] & 0x0F) == 0x0F || codes[i] >= 0xF0;
    if (forbidden || (used && code_bits == 4 && (codes[whole] & 0x0F) == 0x0F))
        return GC_FORBIDDEN_CODE;
    return used && codes[whole] >> used ? GC_BAD_PADDING : GC_OK;
}

gc_status gc_scales_validate(const uint8_t *scales, size_t scale_count, int non_negative)
{
    if (scale_count && !scales)
        return GC_INVALID_ARGUMENT;
    /* a sign that counts makes the pattern larger than Inf */
    uint32_t ignored = non_negative ? 0 : 0x80000000u;
    for (size_t i = 0; i < scale_count; i++)
        if ((gc_load_u32(scales + 4 * i) & ~ignored) >= GC_INF_BITS)
            return GC_BAD_SCALE;
    return GC_OK;
}
