/* values.c - plain fp32 and bf16 values: tensors that are not compressed. */
#include "numeric.h"

GC_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                           uint32_t numel, int dtype)
{
    uint8_t *codes = job->payload + segment->codes;
    for (size_t i = first; i < (size_t)first + numel; i++) {
        float x = gc_load(job->src, dtype, segment->data + i);
        if (job->value_dtype == GC_F32) {
            gc_store_u32(codes + 4 * i, gc_bits_of(x));
        } else {
            gc_store_u16(codes + 2 * i, gc_to_bf16(x));
            /* rounding may overflow, and the peers will see that */
            x = gc_from_bf16(gc_to_bf16(x));
        }
        job->nonfinite |= !gc_is_finite(x);
    }
}

void gc_values_encode_span(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                           uint32_t numel)
{
    GC_BY_DTYPE(job->dtype, encode_body(job, segment, first, numel, GC_F32),
                encode_body(job, segment, first, numel, GC_BF16),
                encode_body(job, segment, first, numel, GC_F16));
}

void gc_values_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    gc_values_encode_span(job, segment, 0, segment->numel);
}

GC_INLINE float value_at(const uint8_t *values, int dtype, size_t i)
{
    return dtype == GC_F32 ? gc_load_f32(values + 4 * i)
                           : gc_from_bf16((uint16_t)gc_load_u16(values + 2 * i));
}

void gc_values_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                           uint32_t numel)
{
    float factor = 1.0f / (float)job->payload_count;
    for (size_t i = first; i < (size_t)first + numel; i++) {
        float sum = value_at(job->payloads[0] + segment->codes, job->value_dtype, i);
        for (size_t p = 1; p < job->payload_count; p++)
            sum += value_at(job->payloads[p] + segment->codes, job->value_dtype, i);
        job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + i, sum * factor);
    }
}

void gc_values_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    gc_values_decode_span(job, segment, 0, segment->numel);
}
