/* moments.c - preconditioned encoding: values in units of the roots of second moments, and those
 * moments themselves.
 *
 * One operation after the other an element, each rounded on its own. Compilers turn these loops
 * into vectors as they stand (-fno-math-errno for the root), and memory is what limits them: wider
 * vectors gained nothing, so all tiers use them.
 */
#include <math.h>

#include "checks.h"
#include "environment.h"
#include "numeric.h"

GC_INLINE uint32_t is_special(float value)
{
    return (gc_bits_of(value) & GC_INF_BITS) == GC_INF_BITS;
}

static void divide(const float *restrict src, const float *restrict residual,
                   const float *restrict moments, float floor, uint64_t numel,
                   float *restrict units, float *restrict out)
{
    for (uint64_t i = 0; i < numel; i++) {
        float unit = sqrtf(moments[i]) + floor;
        units[i] = unit;
        out[i] = (residual ? src[i] + residual[i] : src[i]) / unit;
    }
}

static uint32_t multiply(float *restrict values, const float *restrict units, uint64_t numel)
{
    uint32_t special = 0;
    for (uint64_t i = 0; i < numel; i++) {
        float value = values[i] * units[i];
        values[i] = value;
        special |= is_special(value);
    }
    return special;
}

static uint32_t follow(const float *restrict values, float inverse, const float *restrict before,
                       float keep, float gain, uint64_t numel, float *restrict after)
{
    uint32_t special = 0;
    for (uint64_t i = 0; i < numel; i++) {
        float x = values[i] * inverse;
        float moment = x * x * gain + (before ? before[i] * keep : keep);
        after[i] = moment;
        special |= is_special(moment);
    }
    return special;
}

gc_status gc_moments_divide(const float *src, const float *residual, const float *moments,
                            float floor, uint64_t numel, float *units, float *out)
{
    if (numel && (!src || !moments || !units || !out || src == out))
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    divide(src, residual, moments, floor, numel, units, out);
    gc_leave_float_environment(saved);
    return GC_OK;
}

gc_status gc_moments_multiply(float *values, const float *units, uint64_t numel,
                              uint32_t *nonfinite)
{
    if (!nonfinite || (numel && (!values || !units)))
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    uint32_t special = multiply(values, units, numel);
    gc_leave_float_environment(saved);
    gc_report(nonfinite, special);
    return GC_OK;
}

gc_status gc_moments_follow(const float *values, float inverse, const float *before, float keep,
                            float gain, uint64_t numel, float *after, uint32_t *nonfinite)
{
    if (!nonfinite || (numel && (!values || !after || values == after || before == after)))
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    uint32_t special = follow(values, inverse, before, keep, gain, numel, after);
    gc_leave_float_environment(saved);
    gc_report(nonfinite, special);
    return GC_OK;
}
