/* dispatch.c - the tiers: one constant table of kernels each, and which of them is in use. */
#include <stdatomic.h>

#include "internal.h"

enum { TIER_PORTABLE, TIER_AVX2, TIER_AVX512, TIER_NEON, TIER_COUNT };

static const gc_kernels tier_kernels[] = {
    [TIER_PORTABLE] =
        {
            .block_sums = gc_block_sums_portable,
            .ternary_encode = gc_ternary_encode_portable,
            .onebit_encode = gc_onebit_encode_portable,
            .block_encode = gc_block_encode_portable,
            .values_encode = gc_values_encode_portable,
            .entropy_encode = gc_entropy_encode_portable,
            .ternary_decode = gc_ternary_decode_portable,
            .lanes_decode = gc_lanes_decode_portable,
            .onebit_decode = gc_onebit_decode_portable,
            .block_decode = gc_block_decode_portable,
            .values_decode = gc_values_decode_portable,
            .entropy_decode = gc_entropy_decode_portable,
            .sum_lanes = gc_sum_lanes_portable,
            .ternary_validate = gc_ternary_validate_portable,
            .onebit_validate = gc_onebit_validate_portable,
            .block_validate = gc_block_validate_portable,
            .lanes_validate = gc_lanes_validate_portable,
            .crc32c = gc_crc32c_portable,
            .update = gc_update_portable,
        },
#if defined(__x86_64__)
    [TIER_AVX2] =
        {
            .block_sums = gc_block_sums_avx2,
            .ternary_encode = gc_ternary_encode_avx2,
            .onebit_encode = gc_onebit_encode_avx2,
            .block_encode = gc_block_encode_avx2,
            .values_encode = gc_values_encode_avx2,
            .entropy_encode = gc_entropy_encode_avx2,
            .ternary_decode = gc_ternary_decode_avx2,
            .lanes_decode = gc_lanes_decode_avx2,
            .onebit_decode = gc_onebit_decode_avx2,
            .block_decode = gc_block_decode_avx2,
            .values_decode = gc_values_decode_avx2,
            .entropy_decode = gc_entropy_decode_avx2,
            .sum_lanes = gc_sum_lanes_avx2,
            .ternary_validate = gc_ternary_validate_avx2,
            .onebit_validate = gc_onebit_validate_portable,
            .block_validate = gc_block_validate_portable,
            .lanes_validate = gc_lanes_validate_avx2,
            .crc32c = gc_crc32c_avx2,
            .update = gc_update_avx2,
        },
    [TIER_AVX512] =
        {
            .block_sums = gc_block_sums_avx2,
            .ternary_encode = gc_ternary_encode_avx512,
            .onebit_encode = gc_onebit_encode_avx512,
            .block_encode = gc_block_encode_avx512,
            .values_encode = gc_values_encode_avx2,
            .entropy_encode = gc_entropy_encode_avx512,
            .ternary_decode = gc_ternary_decode_avx2,
            .lanes_decode = gc_lanes_decode_avx2,
            .onebit_decode = gc_onebit_decode_avx2,
            .block_decode = gc_block_decode_avx2,
            .values_decode = gc_values_decode_avx2,
            .entropy_decode = gc_entropy_decode_avx2,
            .sum_lanes = gc_sum_lanes_avx2,
            .ternary_validate = gc_ternary_validate_avx2,
            .onebit_validate = gc_onebit_validate_portable,
            .block_validate = gc_block_validate_portable,
            .lanes_validate = gc_lanes_validate_avx2,
            .crc32c = gc_crc32c_avx2,
            .update = gc_update_avx2,
        },
#endif
#if defined(GC_NEON)
    [TIER_NEON] =
        {
            .block_sums = gc_block_sums_neon,
            .ternary_encode = gc_ternary_encode_neon,
            .onebit_encode = gc_onebit_encode_neon,
            .block_encode = gc_block_encode_neon,
            .values_encode = gc_values_encode_neon,
            .entropy_encode = gc_entropy_encode_portable,
            .ternary_decode = gc_ternary_decode_neon,
            .lanes_decode = gc_lanes_decode_portable,
            .onebit_decode = gc_onebit_decode_neon,
            .block_decode = gc_block_decode_neon,
            .values_decode = gc_values_decode_neon,
            .entropy_decode = gc_entropy_decode_portable,
            .sum_lanes = gc_sum_lanes_neon,
            .ternary_validate = gc_ternary_validate_neon,
            .onebit_validate = gc_onebit_validate_portable,
            .block_validate = gc_block_validate_portable,
            .lanes_validate = gc_lanes_validate_portable,
            .crc32c = gc_crc32c_neon,
            .update = gc_update_portable,
        },
#endif
};

/* -1 until a tier is selected or asked for. Atomic because kernels of several threads may ask at
 * once; they all find the same answer. */
static atomic_int chosen_tier = -1;

int gc_tier_count(void) { return TIER_COUNT; }

const char *gc_tier_name(int tier)
{
    static const char *const names[TIER_COUNT] = {"portable", "avx2", "avx512",
                                                  "neon"}; /* also of tiers that this build lacks */
    return tier >= 0 && tier < TIER_COUNT ? names[tier] : NULL;
}

int gc_tier_supported(int tier)
{
#if defined(GC_NEON) /* every aarch64 processor has it */
    if (tier == TIER_NEON)
        return 1;
#endif
    return tier == TIER_PORTABLE || (tier == TIER_AVX2 && gc_cpu_has_avx2()) ||
           (tier == TIER_AVX512 && gc_cpu_has_avx512());
}

int gc_tier_current(void)
{
    int tier = atomic_load_explicit(&chosen_tier, memory_order_relaxed);
    if (tier < 0) {
        for (tier = TIER_COUNT - 1; !gc_tier_supported(tier); tier--)
            ;
        atomic_store_explicit(&chosen_tier, tier, memory_order_relaxed);
    }
    return tier;
}

int gc_tier_select(int tier)
{
    if (tier < 0 || tier >= TIER_COUNT)
        return GC_INVALID_ARGUMENT;
    if (!gc_tier_supported(tier))
        return GC_UNSUPPORTED_TIER;
    atomic_store_explicit(&chosen_tier, tier, memory_order_relaxed);
    return GC_OK;
}

const gc_kernels *gc_current_kernels(void) { return &tier_kernels[gc_tier_current()]; }
