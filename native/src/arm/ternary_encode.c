/* ternary_encode.c - ternary codes of whole superblocks: 64 elements, eight Philox blocks, sixteen
 * bytes.
 *
 * Word w of blocks 0-3 and of blocks 4-7 are two vectors; their even 16-bit halves are the draws of
 * elements 16w to 16w + 7, the odd ones those of 16w + 8 to 16w + 15.
 */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"
#include "superblocks.h"

enum { WORDS = 4 };

/* ---- random numbers -------------------------------------------------------------------------- */
/* 32-bit halves of the products of four lanes with m. */
typedef struct {
    uint32x4_t low, high;
} product;

GC_INLINE product times(uint32x4_t x, uint32_t m)
{
    uint32x4_t a = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(x), m));
    uint32x4_t b = vreinterpretq_u32_u64(vmull_high_n_u32(x, m));
    return (product){vuzp1q_u32(a, b), vuzp2q_u32(a, b)};
}

GC_INLINE uint32x4_t flip(uint32x4_t x, uint32_t bits) { return veorq_u32(x, vdupq_n_u32(bits)); }

/* Four blocks, whose numbers are the lanes of `numbers`. */
GC_INLINE void philox4(const gc_philox_plan *plan, uint32x4_t numbers, uint32x4_t c[WORDS])
{
    product p0 = times(numbers, GC_PHILOX_M0),
            p1 = times(flip(p0.high, plan->round1_c2), GC_PHILOX_M1);
    c[0] = flip(p1.high, plan->round2_c0);
    c[1] = p1.low;
    c[2] = flip(p0.low, plan->round2_c2);
    p0 = times(c[0], GC_PHILOX_M0);
    p1 = times(c[2], GC_PHILOX_M1);
    c[0] = veorq_u32(flip(c[1], plan->key0[2]), p1.high);
    c[1] = p1.low;
    c[2] = flip(p0.high, plan->round3_c2);
    c[3] = p0.low;
    for (int r = 3; r < GC_PHILOX_ROUNDS; r++) {
        p0 = times(c[0], GC_PHILOX_M0);
        p1 = times(c[2], GC_PHILOX_M1);
        c[0] = veorq_u32(flip(c[1], plan->key0[r]), p1.high);
        c[1] = p1.low;
        c[2] = veorq_u32(flip(c[3], plan->key1[r]), p0.high);
        c[3] = p0.low;
    }
}

/* The 64 draws of a superblock: vectors 2w and 2w + 1 hold those of elements 16w to 16w + 15. */
GC_INLINE void draw64(const gc_philox_plan *plan, uint32_t superblock, uint16x8_t draws[2 * WORDS])
{
    static const uint32_t offsets[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint32x4_t first = vdupq_n_u32(8 * superblock), c[2][WORDS];
    philox4(plan, vaddq_u32(first, vld1q_u32(offsets)), c[0]);
    philox4(plan, vaddq_u32(first, vld1q_u32(offsets + 4)), c[1]);
    for (int w = 0; w < WORDS; w++) {
        uint16x8_t a = vreinterpretq_u16_u32(c[0][w]), b = vreinterpretq_u16_u32(c[1][w]);
        draws[2 * w] = vuzp1q_u16(a, b);
        draws[2 * w + 1] = vuzp2q_u16(a, b);
    }
}

/* ---- decisions ------------------------------------------------------------------------------- */
/* 1 + |x| / S * 65536, rounded down, at most 65535; 0 where that is NaN. A product with 65536 / S
 * instead of the quotient may be off by one, which GC_OPEN_DISTANCE allows for. */
GC_INLINE uint16x4_t threshold4(float32x4_t x, float32x4_t factor)
{
    return vqmovn_u32(vcvtq_u32_f32(vfmaq_f32(vdupq_n_f32(1.0f), vabsq_f32(x), factor)));
}

/* Codes of eight elements; their distances go to `distance`. */
GC_INLINE uint8x8_t codes8(gc_eight x, gc_eight factor, uint16x8_t draws, uint16x8_t *distance)
{
    uint16x8_t t = vcombine_u16(threshold4(x.a, factor.a), threshold4(x.b, factor.b));
    uint16x8_t is_negative = vreinterpretq_u16_s16(vshrq_n_s16(
        vreinterpretq_s16_u16(vcombine_u16(vshrn_n_u32(vreinterpretq_u32_f32(x.a), 16),
                                           vshrn_n_u32(vreinterpretq_u32_f32(x.b), 16))),
        15));
    *distance = vsubq_u16(t, draws);
    uint16x8_t nonzero = vbicq_u16(vdupq_n_u16(2), is_negative);
    return vmovn_u16(vbslq_u16(vcltq_u16(draws, t), nonzero, vdupq_n_u16(1)));
}

/* Pack 64 codes, a byte each, to sixteen bytes. */
GC_INLINE uint8x16_t pack64(const uint8x16_t codes[WORDS])
{
    uint8x16_t pairs[WORDS];
    for (int w = 0; w < WORDS; w++) { /* the low byte of 16 bits takes both codes */
        uint16x8_t x = vreinterpretq_u16_u8(codes[w]);
        pairs[w] = vreinterpretq_u8_u16(vsraq_n_u16(x, x, 6));
    }
    uint16x8_t low = vreinterpretq_u16_u8(vuzp1q_u8(pairs[0], pairs[1]));
    uint16x8_t high = vreinterpretq_u16_u8(vuzp1q_u8(pairs[2], pairs[3]));
    return vuzp1q_u8(vreinterpretq_u8_u16(vsraq_n_u16(low, low, 4)),
                     vreinterpretq_u8_u16(vsraq_n_u16(high, high, 4)));
}

/* ---- superblocks ----------------------------------------------------------------------------- */
GC_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment,
                           const gc_philox_plan *plan, const gc_superblocks *blocks, int is_uniform,
                           int dtype)
{
    uint8_t *codes = job->payload + segment->codes;
    uint32x4_t absmax = vdupq_n_u32(0);
    gc_eight factor = {vdupq_n_f32(*blocks->factors), vdupq_n_f32(*blocks->factors)};
    uint32_t position = blocks->first;
    for (uint32_t count = blocks->count; count; count--, position += GC_SUPERBLOCK_NUMEL) {
        uint64_t at = segment->data + position;
        uint16x8_t draws[2 * WORDS], distances[2 * WORDS], least = vdupq_n_u16(0xFFFF);
        uint8x16_t bytes[WORDS];
        draw64(plan, (segment->start + position) / GC_SUPERBLOCK_NUMEL, draws);
        for (int w = 0; w < WORDS; w++) {
            uint8x8_t halves[2];
            for (int h = 0; h < 2; h++) {
                gc_eight x = gc_load8(job->src, dtype, at + 16 * w + 8 * h);
                absmax = gc_abs_max8(absmax, x);
                if (!is_uniform)
                    factor = gc_load8(blocks->factors, GC_F32, 16 * w + 8 * h);
                halves[h] = codes8(x, factor, draws[2 * w + h], &distances[2 * w + h]);
                least = vminq_u16(least, distances[2 * w + h]);
            }
            bytes[w] = vcombine_u8(halves[0], halves[1]);
        }
        vst1q_u8(codes + position / 4, pack64(bytes));
        if (vminvq_u16(least) <= GC_OPEN_DISTANCE) {
            uint16_t distance[GC_SUPERBLOCK_NUMEL];
            for (int v = 0; v < 2 * WORDS; v++)
                vst1q_u16(distance + 8 * v, distances[v]);
            gc_recheck_superblock(job, segment, position, distance);
        }
    }
    job->nonfinite |= vmaxvq_u32(absmax) >= GC_INF_BITS;
}

static void encode_superblocks(gc_encode_job *job, const gc_segment *segment,
                               const gc_philox_plan *plan, const gc_superblocks *blocks)
{
    if (blocks->is_uniform)
        GC_BY_DTYPE(job->dtype, encode_body(job, segment, plan, blocks, 1, GC_F32),
                    encode_body(job, segment, plan, blocks, 1, GC_BF16),
                    encode_body(job, segment, plan, blocks, 1, GC_F16));
    else
        GC_BY_DTYPE(job->dtype, encode_body(job, segment, plan, blocks, 0, GC_F32),
                    encode_body(job, segment, plan, blocks, 0, GC_BF16),
                    encode_body(job, segment, plan, blocks, 0, GC_F16));
}

void gc_ternary_encode_neon(gc_encode_job *job, const gc_segment *segment)
{
    gc_encode_superblocks(job, segment, encode_superblocks);
}
#endif
