/* ternary_decode.c - averages of ternary payloads, as values and as integer lanes of up to 8 bits.
 *
 * Codes are spread to bytes in the order of the elements, 64 at a time, by an interleaving store;
 * integer sums of several payloads are made before they are spread.
 */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"
#include "lanes.h"

enum { BLOCK_NBYTES = 16, BLOCK_NUMEL = 64, BYTE_SUMS_PAYLOADS = 127 };

/* Sums of the codes (0, 1, 2) of at most BYTE_SUMS_PAYLOADS payloads, a byte an element: `numel`
 * elements from the code byte `first_byte` of the segment on, rounded up to blocks of
 * BLOCK_NUMEL. */
static void byte_sums(const uint8_t *const *payloads, size_t payload_count,
                      const gc_segment *segment, size_t first_byte, uint32_t numel, uint8_t *sums)
{
    const uint8x16_t low = vdupq_n_u8(3);
    size_t total = gc_code_nbytes(segment->numel, 2);
    for (uint32_t i = 0; i < numel; i += BLOCK_NUMEL) {
        uint8_t rest[BLOCK_NBYTES] = {0};
        size_t byte = first_byte + i / 4, available = total - byte;
        uint8x16x4_t block = {{vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)}};
        for (size_t p = 0; p < payload_count; p++) {
            const uint8_t *codes = payloads[p] + segment->codes + byte;
            if (available < BLOCK_NBYTES)
                codes = memcpy(rest, codes, available);
            uint8x16_t c = vld1q_u8(codes);
            block.val[0] = vaddq_u8(block.val[0], vandq_u8(c, low));
            block.val[1] = vaddq_u8(block.val[1], vandq_u8(vshrq_n_u8(c, 2), low));
            block.val[2] = vaddq_u8(block.val[2], vandq_u8(vshrq_n_u8(c, 4), low));
            block.val[3] = vsraq_n_u8(block.val[3], c, 6);
        }
        vst4q_u8(sums + i, block);
    }
}

/* Eight sums less `count`, as floats. */
GC_INLINE gc_eight values8(const uint8_t *sums, uint8x8_t count)
{
    int16x8_t k = vreinterpretq_s16_u16(vsubl_u8(vld1_u8(sums), count));
    return (gc_eight){vcvtq_f32_s32(vmovl_s16(vget_low_s16(k))), vcvtq_f32_s32(vmovl_high_s16(k))};
}

/* One scale for all payloads, or one payload: k * (S / N). */
static int decode_shared(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    uint8_t sums[GC_PIECE_NUMEL + 2 * BLOCK_NUMEL];
    float stage[GC_STAGE_NUMEL], scales[GC_STAGE_NUMEL], divisor = (float)job->payload_count;
    const uint8x8_t count = vdup_n_u8((uint8_t)job->payload_count);
    uint32_t skipped = piece->first % 4; /* elements of the first byte before the piece */
    byte_sums(job->payloads, job->payload_count, segment, piece->first / 4, skipped + piece->numel,
              sums);
    if (piece->is_uniform) {
        for (uint32_t i = 0; i < piece->numel; i += 8)
            gc_put8(stage + i, values8(sums + skipped + i, count));
        return gc_store_stage(job, segment, piece, stage,
                              gc_scale(job->payloads[0], segment, piece->run.group) / divisor);
    }
    gc_fill_scales(job->payloads[0], segment, piece, 1, 0, scales);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        gc_eight k = values8(sums + skipped + i, count), s = gc_load8(scales, GC_F32, i);
        gc_put8(stage + i, (gc_eight){vmulq_f32(k.a, vdivq_f32(s.a, vdupq_n_f32(divisor))),
                                      vmulq_f32(k.b, vdivq_f32(s.b, vdupq_n_f32(divisor)))});
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f);
}

/* A scale for each payload: values are added in payload order. */
static int decode_own(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    uint8_t codes[GC_PIECE_NUMEL + 2 * BLOCK_NUMEL];
    float stage[GC_STAGE_NUMEL], scales[GC_STAGE_NUMEL];
    const uint8x8_t one = vdup_n_u8(1);
    uint32_t skipped = piece->first % 4;
    for (size_t p = 0; p < job->payload_count; p++) {
        byte_sums(job->payloads + p, 1, segment, piece->first / 4, skipped + piece->numel, codes);
        float scale = gc_scale(job->payloads[p], segment, piece->run.group);
        gc_eight s = {vdupq_n_f32(scale), vdupq_n_f32(scale)};
        if (!piece->is_uniform)
            gc_fill_scales(job->payloads[p], segment, piece, 1, 0, scales);
        for (uint32_t i = 0; i < piece->numel; i += 8) {
            gc_eight x = values8(codes + skipped + i, one);
            if (!piece->is_uniform)
                s = gc_load8(scales, GC_F32, i);
            x = (gc_eight){vmulq_f32(x.a, s.a), vmulq_f32(x.b, s.b)};
            gc_put8(stage + i, p ? gc_plus8(gc_load8(stage, GC_F32, i), x) : x);
        }
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

static int decode_piece(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    if (job->payload_count > 1 && !job->shared)
        return decode_own(job, segment, piece);
    return job->payload_count <= BYTE_SUMS_PAYLOADS && decode_shared(job, segment, piece);
}

void gc_ternary_decode_neon(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_ternary_decode_span);
}

/* ---- lanes ----------------------------------------------------------------------------------- */
/* Move eight lanes of `bits` <= 8 bits, a byte each, together: pairs, then fours, then eights. */
GC_INLINE uint64_t compact8(uint64_t x, unsigned bits)
{
    const uint64_t low8 = 0x00FF00FF00FF00FFu, low16 = 0x0000FFFF0000FFFFu,
                   low32 = 0x00000000FFFFFFFFu;
    x &= 0x0101010101010101u * ((1u << bits) - 1);
    x = (x & low8) | (x & ~low8) >> (8 - bits);
    x = (x & low16) | (x & ~low16) >> (16 - 2 * bits);
    return (x & low32) | (x & ~low32) >> (32 - 4 * bits);
}

void gc_sum_lanes_neon(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                       uint8_t *lanes)
{
    if (job->lane_bits > 8) {
        gc_sum_lanes_span(job, in, out, lanes, 0, in->numel);
        return;
    }
    uint8_t sums[GC_PIECE_NUMEL], packed[GC_PIECE_NUMEL + 8];
    for (uint64_t first = 0; first < in->numel; first += GC_PIECE_NUMEL) {
        uint64_t left = in->numel - first;
        uint32_t numel = left < GC_PIECE_NUMEL ? (uint32_t)left : GC_PIECE_NUMEL;
        byte_sums(job->payloads, job->payload_count, in, (size_t)first / 4, numel, sums);
        /* Lanes of elements that do not exist would be padding other than 0. */
        memset(sums + numel, 0, (GC_PIECE_NUMEL - numel) % BLOCK_NUMEL);
        for (uint32_t i = 0; i < numel; i += 8) {
            uint64_t eight;
            memcpy(&eight, sums + i, 8);
            eight = compact8(eight, job->lane_bits);
            memcpy(packed + i / 8 * job->lane_bits, &eight, 8);
        }
        memcpy(lanes + out->codes + (size_t)first * job->lane_bits / 8, packed,
               gc_code_nbytes(numel, job->lane_bits));
    }
}
#endif
