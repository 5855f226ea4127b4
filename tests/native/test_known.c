/* test_known.c - known answers, names, arguments that must be refused, the floating-point
 * environment, copies. */
#include "harness.h"

static void test_philox(void)
{
    /* From the authors' known-answer file (Random123, kat_vectors, philox4x32 10). */
    static const uint32_t in[3][6] = {
        {0, 0, 0, 0, 0, 0},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0}};
    static const uint32_t expected[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                            {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                            {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        gc_philox4x32_10(in[i], in[i] + 4, out);
        CHECK(memcmp(out, expected[i], sizeof out) == 0);
    }
}

/* Bit by bit, from the definition. */
static uint32_t slow_crc32c(uint32_t crc, const uint8_t *data, size_t nbytes)
{
    crc = ~crc;
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void test_crc32c(void)
{
    CHECK(gc_crc32c(0, (const uint8_t *)"123456789", 9) == 0xE3069283u);
    CHECK(gc_crc32c(7, NULL, 0) == 7);
    for (uint32_t i = 0; i < 400; i++) {
        size_t nbytes = i < 200 ? i : random_below(40000);
        uint8_t *data = guarded(0, nbytes, i % 2 ? AT_END : AT_START, 0);
        for (size_t j = 0; j < nbytes; j++)
            data[j] = (uint8_t)random_u64();
        uint32_t crc = (uint32_t)random_u64(), cut = random_below((uint32_t)nbytes + 1);
        CHECK(gc_crc32c(crc, data, nbytes) == slow_crc32c(crc, data, nbytes));
        CHECK(gc_crc32c(gc_crc32c(crc, data, cut), data + cut, nbytes - cut) ==
              gc_crc32c(crc, data, nbytes));
    }
}

static void test_names(void)
{
    CHECK(strcmp(gc_status_name(GC_OK), "GC_OK") == 0);
    CHECK(strcmp(gc_status_name(GC_INVALID_ARGUMENT), "GC_INVALID_ARGUMENT") == 0);
    CHECK(strcmp(gc_status_name(GC_BAD_SCALE), "GC_BAD_SCALE") == 0);
    CHECK(strcmp(gc_status_name(7), "GC_UNKNOWN_STATUS") == 0 &&
          strcmp(gc_status_name(-1), "GC_UNKNOWN_STATUS") == 0);
    static const char *const tiers[] = {"portable", "avx2", "avx512", "neon"};
    enum { TIERS = sizeof tiers / sizeof tiers[0] };
    CHECK(gc_tier_count() == TIERS && gc_tier_supported(0));
    for (int tier = 0; tier < TIERS; tier++) {
        CHECK(strcmp(gc_tier_name(tier), tiers[tier]) == 0);
        CHECK(gc_tier_select(tier) == (gc_tier_supported(tier) ? GC_OK : GC_UNSUPPORTED_TIER));
    }
#if defined(__aarch64__)
    CHECK(gc_tier_supported(TIERS - 1));
#endif
    CHECK(gc_tier_name(-1) == NULL && gc_tier_name(TIERS) == NULL && !gc_tier_supported(TIERS));
    CHECK(gc_tier_select(TIERS) == GC_INVALID_ARGUMENT &&
          gc_tier_select(-1) == GC_INVALID_ARGUMENT);
    CHECK(sizeof(gc_segment) == 56 && sizeof(gc_block) == 24 && sizeof(gc_rng_key) == 16);
}

static void test_arguments(void)
{
    float src[16] = {1}, residual[16] = {0}, out[16];
    uint8_t payload[64] = {0}, before[64];
    const uint8_t *payloads[2] = {payload, payload}, *holes[2] = {payload, NULL};
    gc_block blocks[4];
    uint32_t flag = 0;
    gc_rng_key key = {1, 2, 3, 4}, deep = {1, 2, 3, 0x80000000u};
    gc_segment good = {0, 0, 8, 0, 0, 0, 16, 16, 0}, odd = good, none = good, no_group = good,
               far = good;
    odd.start = 4;
    none.numel = 0;
    no_group.group_numel = 0;
    far.start = 0xFFFFFFF8u;
    memcpy(before, payload, sizeof payload);
#define REFUSED(call) CHECK((call) == GC_INVALID_ARGUMENT)
    const gc_segment *wrong[] = {NULL, &odd, &no_group, &far};
    for (int i = 0; i < 4; i++) {
        REFUSED(gc_block_sums(src, GC_F32, wrong[i], 1, blocks, &flag));
        REFUSED(gc_ternary_encode(src, GC_F32, wrong[i], 1, payload, key, &flag));
        REFUSED(gc_onebit_encode(src, GC_F32, wrong[i], 1, residual, residual, NULL, 1.0f, NULL,
                                 NULL, payload, &flag));
        REFUSED(gc_block_encode(src, GC_F32, wrong[i], 1, 4, residual, residual, NULL, 1.0f, NULL,
                                payload, &flag));
        REFUSED(gc_nearest_encode(src, GC_F32, wrong[i], 1, 1.8, residual, residual, NULL, 1.0f,
                                  NULL, payload, &flag));
        REFUSED(gc_entropy_encode(src, GC_F32, wrong[i], 1, 1126, residual, residual, NULL, 1.0f,
                                  NULL, payload, &flag));
        REFUSED(gc_entropy_sum_decode(payloads, 2, 1126, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_entropy_validate(payload, 1126, wrong[i], 1));
        REFUSED(gc_values_encode(src, GC_F32, wrong[i], 1, GC_F32, payload, &flag));
        REFUSED(gc_ternary_sum_decode(payloads, 2, 1, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_onebit_sum_decode(payloads, 2, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_block_sum_decode(payloads, 2, 4, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_values_sum_decode(payloads, 2, GC_F32, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_lanes_decode(payload, 2, 3, wrong[i], 1, out, GC_F32, 0, &flag));
        REFUSED(gc_ternary_sum_lanes(payloads, 2, wrong[i], &good, 1, 3, payload));
        REFUSED(gc_ternary_sum_lanes(payloads, 2, &good, wrong[i], 1, 3, payload));
        REFUSED(gc_ternary_validate(payload, wrong[i], 1));
        REFUSED(gc_onebit_validate(payload, wrong[i], 1));
        REFUSED(gc_block_validate(payload, 4, wrong[i], 1));
        REFUSED(gc_lanes_validate(payload, 2, 3, wrong[i], 1));
    }
    REFUSED(gc_block_sums(NULL, GC_F32, &good, 1, blocks, &flag));
    REFUSED(gc_block_sums(src, 3, &good, 1, blocks, &flag));
    REFUSED(gc_block_sums(src, -1, &good, 1, blocks, &flag));
    REFUSED(gc_block_sums(src, GC_F32, &good, 1, NULL, &flag));
    REFUSED(gc_block_sums(src, GC_F32, &good, 1, blocks, NULL));
    REFUSED(gc_ternary_encode(src, GC_F32, &good, 1, NULL, key, &flag));
    REFUSED(gc_ternary_encode(src, GC_F32, &good, 1, payload, deep, &flag));
    for (unsigned bits = 0; bits < 40; bits++) /* 2, 4 and 8 there are */
        if (bits != 2 && bits != 4 && bits != 8) {
            REFUSED(gc_block_encode(src, GC_F32, &good, 1, bits, NULL, NULL, NULL, 1.0f, NULL,
                                    payload, &flag));
            REFUSED(gc_block_sum_decode(payloads, 2, bits, &good, 1, out, GC_F32, 0, &flag));
            REFUSED(gc_block_validate(payload, bits, &good, 1));
        }
    gc_segment stream = good; /* groups are streams, of 512 to 2,048 bytes */
    stream.group_numel = GC_STREAM_NUMEL;
    REFUSED(gc_entropy_validate(payload, 1126, &good, 1));
    CHECK(gc_entropy_validate(payload, 1126, &stream, 1) == GC_OK);
    static const uint32_t sizes[] = {0, 4, GC_STREAM_NBYTES_LEAST - 1, GC_STREAM_NBYTES_MOST + 1,
                                     UINT32_MAX};
    for (int i = 0; i < 5; i++) {
        REFUSED(gc_entropy_encode(src, GC_F32, &stream, 1, sizes[i], NULL, NULL, NULL, 1.0f, NULL,
                                  payload, &flag));
        REFUSED(gc_entropy_sum_decode(payloads, 2, sizes[i], &stream, 1, out, GC_F32, 0, &flag));
        REFUSED(gc_entropy_validate(payload, sizes[i], &stream, 1));
    }
    REFUSED(gc_values_encode(src, GC_F32, &good, 1, GC_F16, payload, &flag));
    REFUSED(gc_ternary_sum_decode(payloads, 0, 1, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_ternary_sum_decode(payloads, 32768, 1, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_ternary_sum_decode(holes, 2, 1, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_ternary_sum_decode(payloads, 1, 1, &good, 1, out, GC_F32, 2, &flag));
    REFUSED(gc_ternary_sum_decode(payloads, 1, 1, &good, 1, NULL, GC_F32, 0, &flag));
    REFUSED(gc_values_sum_decode(payloads, 1, GC_F16, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_lanes_decode(payload, 2, 2, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_lanes_decode(payload, 0, 1, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_lanes_decode(payload, ((size_t)1 << 32) + 2, 3, &good, 1, out, GC_F32, 0, &flag));
    REFUSED(gc_ternary_sum_lanes(payloads, 2, &good, &none, 1, 3, payload));
    REFUSED(gc_ternary_scales(NULL, NULL, NULL, 1, 2.5, NULL));
    REFUSED(gc_scales_validate(NULL, 1, 1));
    REFUSED(gc_copy(payload, NULL, &(gc_copy_range){0, 0, 1}, 1));
    REFUSED(gc_copy(payload, payload, NULL, 1));
#undef REFUSED
    CHECK(memcmp(before, payload, sizeof payload) == 0 && flag == 0);
    /* No elements: no memory is needed. */
    CHECK(gc_block_sums(NULL, GC_F32, NULL, 0, NULL, &flag) == GC_OK);
    CHECK(gc_ternary_encode(NULL, GC_F32, &none, 1, NULL, key, &flag) == GC_OK);
    CHECK(gc_onebit_encode(NULL, GC_F32, &none, 1, NULL, NULL, NULL, 1.0f, NULL, NULL, NULL,
                           &flag) == GC_OK);
    CHECK(gc_ternary_sum_decode(NULL, 1, 0, &none, 1, NULL, GC_F32, 0, &flag) == GC_OK);
    CHECK(gc_ternary_validate(NULL, &none, 1) == GC_OK && gc_scales_validate(NULL, 0, 1) == GC_OK);
    CHECK(gc_copy(NULL, NULL, NULL, 0) == GC_OK &&
          gc_ternary_scales(NULL, NULL, NULL, 0, 1, NULL) == GC_OK);
}

static void test_copy(void)
{
    uint8_t *src = guarded(0, 32, AT_END, 0), *dst = guarded(1, 32, AT_END, 0);
    for (int i = 0; i < 32; i++)
        src[i] = (uint8_t)(i + 1);
    gc_copy_range ranges[] = {{0, 4, 3}, {10, 0, 0}, {31, 31, 1}};
    CHECK(gc_copy(dst, src, ranges, 3) == GC_OK);
    for (int i = 0; i < 32; i++)
        CHECK(dst[i] == (i < 3 ? i + 5 : i == 31 ? 32 : 0));
}

static void test_scales_validate(void)
{
    static const struct {
        uint32_t bits;
        gc_status any_sign, non_negative;
    } rows[] = {{0x00000000, GC_OK, GC_OK},
                {0x3F800000, GC_OK, GC_OK},
                {0x7F7FFFFF, GC_OK, GC_OK},
                {0x00000001, GC_OK, GC_OK},
                {0x80000000, GC_OK, GC_BAD_SCALE},
                {0xBF800000, GC_OK, GC_BAD_SCALE},
                {0x7F800000, GC_BAD_SCALE, GC_BAD_SCALE},
                {0xFF800000, GC_BAD_SCALE, GC_BAD_SCALE},
                {0x7FC00000, GC_BAD_SCALE, GC_BAD_SCALE},
                {0xFF800001, GC_BAD_SCALE, GC_BAD_SCALE}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint8_t *scales = guarded(0, 13, AT_END, 0);
        memcpy(scales + 9, &rows[i].bits, 4);
        CHECK(gc_scales_validate(scales + 1, 3, 0) == rows[i].any_sign);
        CHECK(gc_scales_validate(scales + 1, 3, 1) == rows[i].non_negative);
    }
}

/* A ternary scale is clipped, and a group that is not finite wins the scale round. */
static void test_ternary_scales(void)
{
    gc_block blocks[3] = {{4, 8, 0x40400000, 0}, {0, 8, 0x40000000, 0}, {0, 0, 0x7FC00001, 0}};
    uint64_t group_blocks[5] = {0, 2, 3, 3, 3};
    uint32_t numels[4] = {8, 4, 4, 0}, bits;
    float scales[4];
    CHECK(gc_ternary_scales(blocks, group_blocks, numels, 4, 1.0, scales) == GC_OK);
    CHECK(scales[0] == (float)1.3228756555322954); /* sqrt(16 / 8 - (4 / 8)^2) */
    memcpy(&bits, &scales[1], 4);
    CHECK(bits == 0x7FC00001 && scales[2] == 0 && scales[3] == 0);
    CHECK(gc_ternary_scales(blocks, group_blocks, numels, 4, 0.0, scales) == GC_OK &&
          scales[0] == 3.0f);
    CHECK(gc_ternary_scales(blocks, group_blocks, numels, 4, 9.0, scales) == GC_OK &&
          scales[0] == 3.0f);
    /* Seven 0.1 have no deviation but for rounding: they are kept. Sum 24, squares 80 of 8: mean 3,
     * deviation 1. */
    gc_block equal = {7 * (double)0.1f, 7 * (double)0.1f * 0.1f, 0x3DCCCCCD, 0},
             above = {24, 80, 0x42000000, 0};
    uint64_t one[2] = {0, 1};
    uint32_t seven = 7, eight = 8;
    CHECK(gc_ternary_scales(&equal, one, &seven, 1, 2.5, scales) == GC_OK && scales[0] == 0.1f);
    CHECK(gc_ternary_scales(&above, one, &eight, 1, 2.5, scales) == GC_OK && scales[0] == 4.5f);
}

/* Every table is written whole, and nothing beyond it: the last entry of a decode table has a
 * length, and a pair's own code is found where the table of the next bits says it is. */
static void test_entropy_tables(void)
{
    enum { PAIRS = 256, WINDOW = 2048 };
    uint32_t *symbols = guarded(0, 4 * GC_TABLE_COUNT * PAIRS, AT_END, 0xA5);
    uint32_t *decode = guarded(1, 4 * GC_TABLE_COUNT * WINDOW, AT_END, 0xA5);
    uint32_t *costs = guarded(2, 4 * 9 * GC_TABLE_COUNT, AT_END, 0xA5);
    uint32_t *pair_costs = guarded(3, 4 * GC_TABLE_COUNT * 9 * 16, AT_END, 0xA5);
    uint32_t *tops = guarded(4, 4 * GC_TABLE_COUNT, AT_END, 0xA5);
    double *octave = guarded(5, 8 * 32, AT_END, 0xA5);
    gc_entropy_tables_of(symbols, decode, costs, pair_costs, tops, octave);
    for (int table = 0; table < GC_TABLE_COUNT; table++) {
        CHECK(tops[table] >= 1 && tops[table] <= 7);
        for (int bits = 0; bits < WINDOW; bits++) {
            uint32_t entry = decode[table * WINDOW + bits], length = entry >> 16 & 0xFF;
            CHECK(length >= 1 && length <= 11);
            if (entry >> 24 & 1)
                continue; /* the escape */
            int a = (int8_t)entry, b = (int8_t)(entry >> 8);
            uint32_t symbol = symbols[table * PAIRS + ((a + 8) << 4 | (b + 8))];
            CHECK(symbol >> 16 == length &&
                  (symbol & 0xFFFF) == ((uint32_t)bits & ((1u << length) - 1)));
        }
        for (int i = 0; i < 9 * 16; i++)
            CHECK(pair_costs[table * 9 * 16 + i] != 0xA5A5A5A5u);
    }
    for (int i = 0; i < 9 * GC_TABLE_COUNT; i++)
        CHECK(costs[i] != 0xA5A5A5A5u);
    CHECK(octave[0] == 1.0 && octave[16] > 1.41421 && octave[16] < 1.41422);
}

#if defined(HAS_FLOAT_ENVIRONMENT)
/* Results do not depend on the caller's rounding mode or on flushing denormals, and these are as
 * they were. */
static void test_float_environment(void)
{
    float src[64], residual[64], left[2][64];
    uint8_t payload[2][64];
    uint32_t flag = 0;
    gc_segment segment = {0, 0, 8, 0, 0, 0, 64, 64, 0};
    fill_tensor(src, GC_F32, 64, TINY);
    fill_tensor(residual, GC_F32, 64, TINY);
    for (int i = 0; i < 2; i++) {
        unsigned before = float_environment(), wanted = i ? FLOAT_ODD : FLOAT_DEFAULT;
        memset(payload[i], 0, 64);
        set_float_environment(wanted);
        gc_onebit_encode(src, GC_F32, &segment, 1, residual, left[i], NULL, 1.0f, NULL, NULL,
                         payload[i], &flag);
        unsigned after = float_environment();
        set_float_environment(before);
        CHECK(((after ^ wanted) & FLOAT_MODES) == 0);
    }
    CHECK(memcmp(left[0], left[1], sizeof left[0]) == 0 && memcmp(payload[0], payload[1], 64) == 0);
}
#endif

int main(void)
{
    test_names();
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (!gc_tier_supported(tier))
            continue;
        CHECK(gc_tier_select(tier) == GC_OK && gc_tier_current() == tier);
        snprintf(case_name, sizeof case_name, "tier %s", gc_tier_name(tier));
        test_philox();
        test_crc32c();
        test_arguments();
        test_copy();
        test_scales_validate();
        test_ternary_scales();
        test_entropy_tables();
#if defined(HAS_FLOAT_ENVIRONMENT)
        test_float_environment();
#endif
    }
    puts("test_known: ok");
    return 0;
}
