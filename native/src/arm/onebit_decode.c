/* onebit_decode.c - averages of 1-bit payloads: every lane tests its bit of a byte, and the mask
 * picks a mean. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"

/* Means of bit 0 and bit 1 of eight elements. */
typedef struct {
    gc_eight zeros, ones;
} means;

/* The values of the eight elements whose bits start at `shift` of the byte at `codes`. */
GC_INLINE gc_eight pick8(const uint8_t *codes, unsigned shift, means m)
{
    static const uint32_t weights[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    uint32x4_t bits = vdupq_n_u32(gc_load_u16(codes) >> shift);
    return (gc_eight){vbslq_f32(vtstq_u32(bits, vld1q_u32(weights)), m.ones.a, m.zeros.a),
                      vbslq_f32(vtstq_u32(bits, vld1q_u32(weights + 4)), m.ones.b, m.zeros.b)};
}

GC_INLINE gc_eight every(float mean) { return (gc_eight){vdupq_n_f32(mean), vdupq_n_f32(mean)}; }

static void add_payload_neon(const uint8_t *payload, const gc_segment *segment,
                             const gc_piece *piece, int starts, float *stage)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float zeros[GC_STAGE_NUMEL], ones[GC_STAGE_NUMEL];
    const uint8_t *codes = gc_padded_codes(payload, segment, piece, 1, padded);
    means m = {every(gc_scale(payload, segment, 2 * piece->run.group)),
               every(gc_scale(payload, segment, 2 * piece->run.group + 1))};
    if (!piece->is_uniform) {
        gc_fill_scales(payload, segment, piece, 2, 0, zeros);
        gc_fill_scales(payload, segment, piece, 2, 1, ones);
    }
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        if (!piece->is_uniform)
            m = (means){gc_load8(zeros, GC_F32, i), gc_load8(ones, GC_F32, i)};
        gc_eight x = pick8(codes + i / 8, piece->first % 8, m);
        gc_put8(stage + i, starts ? x : gc_plus8(gc_load8(stage, GC_F32, i), x));
    }
}

static int decode_piece(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
    for (size_t p = 0; p < job->payload_count; p++)
        add_payload_neon(job->payloads[p], segment, piece, p == 0, stage);
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

void gc_onebit_decode_neon(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_onebit_decode_span);
}
#endif
