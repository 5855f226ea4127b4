/* store.c - decoded values from their stage to the output. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"

GC_INLINE uint32x4_t store_body(void *out, uint64_t index, uint32_t numel, const float *stage,
                                float factor, int dtype)
{
    uint32x4_t absmax = vdupq_n_u32(0);
    for (uint32_t i = 0; i < numel; i += 8) {
        gc_eight x = gc_load8(stage, GC_F32, i);
        x = (gc_eight){vmulq_n_f32(x.a, factor), vmulq_n_f32(x.b, factor)};
        absmax = gc_abs_max8(absmax, x);
        gc_write8(out, dtype, index + i, x);
    }
    return absmax;
}

int gc_store_stage(const gc_decode_job *job, const gc_segment *segment, const gc_piece *piece,
                   const float *stage, float factor)
{
    uint32x4_t absmax;
    uint64_t index = segment->data + piece->first;
    GC_BY_DTYPE(job->out_dtype,
                absmax = store_body(job->out, index, piece->numel, stage, factor, GC_F32),
                absmax = store_body(job->out, index, piece->numel, stage, factor, GC_BF16),
                absmax = store_body(job->out, index, piece->numel, stage, factor, GC_F16));
    return vmaxvq_u32(absmax) < gc_overflow_bits(job->out_dtype);
}
#endif
