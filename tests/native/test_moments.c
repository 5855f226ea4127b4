/* test_moments.c - units of second moments, and the factor of residuals, between guard pages and
 * against their definition, element by element. */
#include <math.h>

#include "harness.h"

enum { LONGEST = 3000 };

static float *buffer(int slot, size_t numel, placement where, value_kind kind)
{
    float *values = guarded(slot, 4 * numel, where, 0xA5);
    for (size_t i = 0; i < numel; i++)
        values[i] = random_value(kind);
    return values;
}

/* The same bits, or a NaN each. */
static int same(float found, float expected)
{
    return (isnan(found) && isnan(expected)) || memcmp(&found, &expected, 4) == 0;
}

static void test_lengths(size_t numel, placement where, value_kind kind)
{
    float floor = 1e-8f, inverse = 0.75f, keep = 0.95f, gain = 0.05f, factor = 0.3f;
    float *src = buffer(0, numel, where, kind), *moments = buffer(1, numel, where, NORMAL);
    float *residual = buffer(2, numel, where, kind), *units = buffer(3, numel, where, NORMAL);
    float *out = buffer(4, numel, where, NORMAL), *after = buffer(5, numel, where, NORMAL);
    for (size_t i = 0; i < numel; i++)
        moments[i] *= moments[i];
    for (int fed = 0; fed < 2; fed++) {
        CHECK(gc_moments_divide(src, fed ? residual : NULL, moments, floor, numel, units, out) ==
              GC_OK);
        for (size_t i = 0; i < numel; i++) {
            float unit = sqrtf(moments[i]) + floor, x = fed ? src[i] + residual[i] : src[i];
            CHECK(same(units[i], unit) && same(out[i], x / unit));
        }
    }
    for (int kept = 0; kept < 2; kept++) {
        uint32_t flag = 0, expected = 0;
        CHECK(gc_moments_follow(src, inverse, kept ? moments : NULL, keep, gain, numel, after,
                                &flag) == GC_OK);
        for (size_t i = 0; i < numel; i++) {
            float x = src[i] * inverse, square = x * x, old = (kept ? moments[i] : 1.0f) * keep;
            float wanted = square * gain;
            wanted += old;
            CHECK(same(after[i], wanted));
            expected |= !is_finite_bits(wanted);
        }
        CHECK(flag == expected);
    }
    uint32_t flag = 0, expected = 0;
    float *values = buffer(6, numel, where, kind), *before = buffer(7, numel, where, kind);
    if (numel)
        memcpy(before, values, 4 * numel);
    CHECK(gc_moments_multiply(values, units, numel, &flag) == GC_OK);
    for (size_t i = 0; i < numel; i++) {
        CHECK(same(values[i], before[i] * units[i]));
        expected |= !is_finite_bits(values[i]);
    }
    CHECK(flag == expected);
    if (numel)
        memcpy(values, before, 4 * numel);
    CHECK(gc_rescale(values, numel, factor) == GC_OK);
    for (size_t i = 0; i < numel; i++)
        CHECK(same(values[i], before[i] * factor));
}

int main(void)
{
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        for (size_t i = 0; i < 240; i++) {
            size_t numel = i < 140 ? i : random_below(LONGEST);
            value_kind kind = (value_kind)(i % KIND_COUNT);
            snprintf(case_name, sizeof case_name, "%s, %zu values of kind %d", gc_tier_name(tier),
                     numel, (int)kind);
            test_lengths(numel, i % 2 ? AT_END : AT_START, kind);
        }
    }
    puts("moments: ok");
    return 0;
}
