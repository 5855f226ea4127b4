/* block_decode.c - averages of payloads of evenly spaced levels. */
#include "internal.h"

#if defined(GC_NEON)
#include "blocks.h"
#include "common.h"

/* Eight codes from bit `skipped` of the byte at `codes` on, as floats. */
GC_INLINE gc_eight codes8(const uint8_t *codes, unsigned skipped, unsigned bits)
{
    if (bits == 8) {
        uint16x8_t wide = vmovl_u8(vld1_u8(codes));
        return (gc_eight){vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                          vcvtq_f32_u32(vmovl_high_u16(wide))};
    }
    static const int32_t right[2][8] = {{0, -2, -4, -6, -8, -10, -12, -14},
                                        {0, -4, -8, -12, -16, -20, -24, -28}};
    const int32_t *shifts = right[bits == 4];
    uint32x4_t window = vdupq_n_u32((uint32_t)(gc_load_u64(codes) >> skipped)),
               mask = vdupq_n_u32((1u << bits) - 1);
    return (gc_eight){vcvtq_f32_u32(vandq_u32(vshlq_u32(window, vld1q_s32(shifts)), mask)),
                      vcvtq_f32_u32(vandq_u32(vshlq_u32(window, vld1q_s32(shifts + 4)), mask))};
}

GC_INLINE gc_eight values8(gc_eight codes, gc_eight scales, unsigned bits)
{
    const float32x4_t zero = vdupq_n_f32(gc_block_zero(bits));
    return (gc_eight){vmulq_f32(vsubq_f32(codes.a, zero), scales.a),
                      vmulq_f32(vsubq_f32(codes.b, zero), scales.b)};
}

/* Add the values of one payload to the stage; the first one starts it. */
GC_INLINE void add_bits(const uint8_t *payload, const gc_segment *segment, const gc_piece *piece,
                        unsigned bits, int starts, float *stage)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float each[GC_STAGE_NUMEL], scale = gc_scale(payload, segment, piece->run.group);
    const uint8_t *codes = gc_padded_codes(payload, segment, piece, bits, padded);
    gc_eight scales = {vdupq_n_f32(scale), vdupq_n_f32(scale)};
    if (!piece->is_uniform)
        gc_fill_scales(payload, segment, piece, 1, 0, each);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        if (!piece->is_uniform)
            scales = gc_load8(each, GC_F32, i);
        gc_eight x = values8(codes8(codes + (size_t)i * bits / 8, piece->first * bits % 8, bits),
                             scales, bits);
        gc_put8(stage + i, starts ? x : gc_plus8(gc_load8(stage, GC_F32, i), x));
    }
}

static void add_payload(const gc_decode_job *job, const uint8_t *payload, const gc_segment *segment,
                        const gc_piece *piece, int starts, float *stage)
{
    if (job->code_bits == 2)
        add_bits(payload, segment, piece, 2, starts, stage);
    else if (job->code_bits == 4)
        add_bits(payload, segment, piece, 4, starts, stage);
    else
        add_bits(payload, segment, piece, 8, starts, stage);
}

static int decode_piece(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
    for (size_t p = 0; p < job->payload_count; p++)
        add_payload(job, job->payloads[p], segment, piece, p == 0, stage);
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

void gc_block_decode_neon(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_block_decode_span);
}
#endif
