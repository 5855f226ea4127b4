/* validate.c - ternary codes looked through 64 bytes at a time; what is left over goes to the
 * portable kernel. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"

enum { STEP_NBYTES = 64, CODES_PER_BYTE = 4 };

gc_status gc_ternary_validate_neon(const uint8_t *codes, uint32_t numel)
{
    size_t nbytes = numel / CODES_PER_BYTE / STEP_NBYTES * STEP_NBYTES;
    uint8x16_t forbidden = vdupq_n_u8(0); /* bit 0 of a code that has both bits set */
    for (size_t i = 0; i < nbytes; i += STEP_NBYTES)
        for (size_t j = 0; j < STEP_NBYTES; j += 16) {
            uint8x16_t x = vld1q_u8(codes + i + j);
            forbidden = vorrq_u8(forbidden, vandq_u8(x, vshrq_n_u8(x, 1)));
        }
    if (vmaxvq_u8(vandq_u8(forbidden, vdupq_n_u8(0x55))))
        return GC_FORBIDDEN_CODE;
    return gc_ternary_validate_portable(codes + nbytes,
                                        numel - (uint32_t)(nbytes * CODES_PER_BYTE));
}
#endif
