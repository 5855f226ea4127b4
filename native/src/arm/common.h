/* common.h - what the neon kernels share: typed loads of eight elements, stores of decoded
 * values. */
#ifndef GC_ARM_COMMON_H
#define GC_ARM_COMMON_H

#include <arm_neon.h>

#include "pieces.h"

/* Eight elements in order. */
typedef struct {
    float32x4_t a, b;
} gc_eight;

/* Payloads are not aligned: vectors are loaded and stored as bytes. */
GC_INLINE uint8x16_t gc_load_bytes(const void *src, uint64_t offset)
{
    return vld1q_u8((const uint8_t *)src + offset);
}
GC_INLINE void gc_store_bytes(void *out, uint64_t offset, uint8x16_t bytes)
{
    vst1q_u8((uint8_t *)out + offset, bytes);
}

GC_INLINE gc_eight gc_load8(const void *src, int dtype, uint64_t i)
{
    if (dtype == GC_F32)
        return (gc_eight){vreinterpretq_f32_u8(gc_load_bytes(src, 4 * i)),
                          vreinterpretq_f32_u8(gc_load_bytes(src, 4 * i + 16))};
    uint16x8_t h = vreinterpretq_u16_u8(gc_load_bytes(src, 2 * i));
    if (dtype == GC_BF16)
        return (gc_eight){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
    float16x8_t f = vreinterpretq_f16_u16(h);
    return (gc_eight){vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f)};
}

GC_INLINE gc_eight gc_plus8(gc_eight x, gc_eight y)
{
    return (gc_eight){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)};
}

GC_INLINE void gc_put8(float *out, gc_eight x)
{
    vst1q_f32(out, x.a);
    vst1q_f32(out + 4, x.b);
}

/* Bit patterns of |x|. */
GC_INLINE uint32x4_t gc_abs4(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }
GC_INLINE uint32x4_t gc_abs_max8(uint32x4_t largest, gc_eight x)
{
    return vmaxq_u32(largest, vmaxq_u32(gc_abs4(x.a), gc_abs4(x.b)));
}

/* Sum of sixteen lanes, lanes 2j and 2j + 1 in vector j, by the tree that gc_lanes_total pins. */
GC_INLINE double gc_total16(const float64x2_t lanes[8])
{
    float64x2_t four[4];
    for (int j = 0; j < 4; j++)
        four[j] = vaddq_f64(lanes[j], lanes[j + 4]);
    return vpaddd_f64(vaddq_f64(vaddq_f64(four[0], four[2]), vaddq_f64(four[1], four[3])));
}

/* Four finite values as bf16, rounded to nearest even. */
GC_INLINE uint16x4_t gc_to_bf16x4(float32x4_t x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x),
               odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
}

/* Write eight finite values. */
GC_INLINE void gc_write8(void *out, int dtype, uint64_t i, gc_eight x)
{
    if (dtype == GC_F32) {
        gc_store_bytes(out, 4 * i, vreinterpretq_u8_f32(x.a));
        gc_store_bytes(out, 4 * i + 16, vreinterpretq_u8_f32(x.b));
    } else if (dtype == GC_BF16) {
        gc_store_bytes(out, 2 * i,
                       vreinterpretq_u8_u16(vcombine_u16(gc_to_bf16x4(x.a), gc_to_bf16x4(x.b))));
    } else {
        gc_store_bytes(out, 2 * i,
                       vreinterpretq_u8_f16(vcombine_f16(vcvt_f16_f32(x.a), vcvt_f16_f32(x.b))));
    }
}

/* Write stage[0 .. piece->numel) * factor to the piece's place in the output; 0 if one of them is
 * not finite there. */
int gc_store_stage(const gc_decode_job *job, const gc_segment *segment, const gc_piece *piece,
                   const float *stage, float factor);

#endif
