/* values.c - plain fp32 and bf16 values, eight at a time. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"

/* ---- encode ---------------------------------------------------------------------------------- */
GC_INLINE uint32_t encode_body(const void *src, uint64_t index, uint32_t numel, int value_dtype,
                               uint8_t *values, int dtype)
{
    uint32x4_t absmax = vdupq_n_u32(0);
    for (uint32_t i = 0; i < numel; i += 8) {
        gc_eight x = gc_load8(src, dtype, index + i);
        absmax = gc_abs_max8(absmax, x);
        gc_write8(values, value_dtype, i, x);
    }
    return vmaxvq_u32(absmax);
}

void gc_values_encode_neon(gc_encode_job *job, const gc_segment *segment)
{
    size_t size = job->value_dtype == GC_F32 ? 4 : 2;
    for (uint32_t first = 0; first < segment->numel;) {
        uint32_t left = segment->numel - first,
                 numel = left < GC_PIECE_NUMEL ? left & ~7u : GC_PIECE_NUMEL;
        if (numel == 0) {
            gc_values_encode_span(job, segment, first, left);
            return;
        }
        uint32_t absmax;
        uint8_t *values = job->payload + segment->codes + size * first;
        GC_BY_DTYPE(job->dtype,
                    absmax = encode_body(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_F32),
                    absmax = encode_body(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_BF16),
                    absmax = encode_body(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_F16));
        if (absmax >= gc_overflow_bits(job->value_dtype))
            gc_values_encode_span(job, segment, first, numel);
        first += numel;
    }
}

/* ---- decode ---------------------------------------------------------------------------------- */
GC_INLINE void add_values(const uint8_t *values, uint32_t numel, int starts, float *stage,
                          int dtype)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        gc_eight x = gc_load8(values, dtype, i);
        gc_put8(stage + i, starts ? x : gc_plus8(gc_load8(stage, GC_F32, i), x));
    }
}

static int decode_piece(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
    for (size_t p = 0; p < job->payload_count; p++) {
        const uint8_t *values = job->payloads[p] + segment->codes;
        if (job->value_dtype == GC_F32)
            add_values(values + 4 * (size_t)piece->first, piece->numel, p == 0, stage, GC_F32);
        else
            add_values(values + 2 * (size_t)piece->first, piece->numel, p == 0, stage, GC_BF16);
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

void gc_values_decode_neon(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_values_decode_span);
}
#endif
