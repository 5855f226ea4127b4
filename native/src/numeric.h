/* numeric.h - bits of floating-point numbers: bf16 and f16, unaligned little-endian access, typed
 * loads and stores.
 *
 * Everything here is exact or rounds to nearest even, and keeps NaN a NaN. Stores write the
 * canonical quiet NaN, because which NaN an addition returns is up to the order in which a compiler
 * passes its operands.
 */
#ifndef GC_NUMERIC_H
#define GC_NUMERIC_H

#include <string.h>

#include "internal.h"

#define GC_ABS_MASK 0x7FFFFFFFu
#define GC_INF_BITS 0x7F800000u
#define GC_NAN_BITS 0x7FC00000u

GC_INLINE uint32_t gc_bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

GC_INLINE float gc_float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

GC_INLINE uint32_t gc_abs_bits(float value) { return gc_bits_of(value) & GC_ABS_MASK; }
GC_INLINE int gc_is_finite(float value) { return gc_abs_bits(value) < GC_INF_BITS; }
GC_INLINE int gc_is_nan(float value) { return gc_abs_bits(value) > GC_INF_BITS; }

/* Add lanes j and j + k for k = 8, 4, 2, 1: the sum of a block is lane 0. */
GC_INLINE double gc_lanes_total(double lanes[GC_SUM_LANES])
{
    for (int k = GC_SUM_LANES / 2; k >= 1; k /= 2)
        for (int j = 0; j < k; j++)
            lanes[j] += lanes[j + k];
    return lanes[0];
}

/* The number of bits of x, without zeros in front. */
GC_INLINE uint32_t gc_bit_length(uint32_t x)
{
#if defined(__GNUC__) || defined(__clang__)
    return x ? 32 - (uint32_t)__builtin_clz(x) : 0;
#else
    uint32_t length = 0;
    for (; x; x >>= 1)
        length++;
    return length;
#endif
}

/* Before element `i` of a group: add a run that is over to the total, and begin the next. */
GC_INLINE void gc_next_run(double *total, double *run, uint32_t i)
{
    if (i == 0 || i % GC_RUN_NUMEL)
        return;
    *total += *run;
    *run = 0;
}

/* ---- payload bytes --------------------------------------------------------------------------- */
GC_INLINE uint32_t gc_load_u16(const uint8_t *p) { return (uint32_t)(p[0] | p[1] << 8); }
GC_INLINE uint32_t gc_load_u32(const uint8_t *p)
{
    return gc_load_u16(p) | gc_load_u16(p + 2) << 16;
}
/* Not every compiler sees that eight bytes are a word. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define GC_LITTLE_ENDIAN 1
#endif

GC_INLINE uint64_t gc_load_u64(const uint8_t *p)
{
#if defined(GC_LITTLE_ENDIAN)
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
#else
    return gc_load_u32(p) | (uint64_t)gc_load_u32(p + 4) << 32;
#endif
}
GC_INLINE float gc_load_f32(const uint8_t *p) { return gc_float_of(gc_load_u32(p)); }

GC_INLINE void gc_store_u16(uint8_t *p, uint32_t value)
{
#if defined(GC_LITTLE_ENDIAN)
    uint16_t half = (uint16_t)value;
    memcpy(p, &half, sizeof half);
#else
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
#endif
}

GC_INLINE void gc_store_u32(uint8_t *p, uint32_t value)
{
    gc_store_u16(p, value);
    gc_store_u16(p + 2, value >> 16);
}

GC_INLINE void gc_store_u64(uint8_t *p, uint64_t value)
{
#if defined(GC_LITTLE_ENDIAN)
    memcpy(p, &value, sizeof value);
#else
    gc_store_u32(p, (uint32_t)value);
    gc_store_u32(p + 4, (uint32_t)(value >> 32));
#endif
}

/* Scale `index` of a segment of a payload. */
GC_INLINE float gc_scale(const uint8_t *payload, const gc_segment *segment, uint32_t index)
{
    return gc_load_f32(payload + segment->scales + 4 * (size_t)index);
}

/* ---- bf16, f16 ------------------------------------------------------------------------------- */
GC_INLINE float gc_from_bf16(uint16_t h) { return gc_float_of((uint32_t)h << 16); }

GC_INLINE uint16_t gc_to_bf16(float value)
{
    uint32_t bits = gc_bits_of(value);
    if (gc_is_nan(value))
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

GC_INLINE float gc_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 0) /* zero or subnormal: mantissa * 2^-24, exact */
        return gc_float_of(gc_bits_of((float)mantissa * 0x1p-24f) | sign);
    if (exponent == 31) /* quiet the NaNs, as the conversion instructions do */
        return gc_float_of(sign | GC_INF_BITS | mantissa << 13 | (mantissa ? 0x00400000u : 0));
    return gc_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

GC_INLINE uint16_t gc_to_f16(float value)
{
    uint32_t bits = gc_bits_of(value), sign = bits >> 16 & 0x8000, a = bits & GC_ABS_MASK;
    if (a > GC_INF_BITS)
        return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x3FF));
    if (a >= 0x477FF000u) /* 65520, half way to the first value above the range */
        return (uint16_t)(sign | 0x7C00);
    /* below 2^-14: one unit in the last place of 0.5f is 2^-24, the subnormals' spacing */
    if (a < 0x38800000u)
        return (uint16_t)(sign | (gc_bits_of(gc_float_of(a) + 0.5f) - 0x3F000000u));
    return (uint16_t)(sign | (((a + 0xFFF + (a >> 13 & 1)) >> 13) - (112u << 10)));
}

/* ---- tensors --------------------------------------------------------------------------------- */
GC_INLINE float gc_load(const void *src, int dtype, uint64_t i)
{
    if (dtype == GC_F32)
        return ((const float *)src)[i];
    return dtype == GC_BF16 ? gc_from_bf16(((const uint16_t *)src)[i])
                            : gc_from_f16(((const uint16_t *)src)[i]);
}

/* Store value i of a tensor; 1 when what was written is not finite. */
GC_INLINE uint32_t gc_store(void *out, int dtype, uint64_t i, float value)
{
    if (gc_is_nan(value))
        value = gc_float_of(GC_NAN_BITS);
    if (dtype == GC_F32) {
        ((float *)out)[i] = value;
        return !gc_is_finite(value);
    }
    uint16_t h = dtype == GC_BF16 ? gc_to_bf16(value) : gc_to_f16(value),
             exponent = dtype == GC_BF16 ? 0x7F80 : 0x7C00;
    ((uint16_t *)out)[i] = h;
    return (h & exponent) == exponent;
}

#endif
