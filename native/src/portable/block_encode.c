/* block_encode.c - evenly spaced levels with error feedback: the scale of a group, then its codes
 * and the new residual. */
#include "blocks.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

GC_INLINE float corrected(const gc_encode_job *job, int dtype, const gc_segment *segment,
                          uint32_t i)
{
    float g = gc_load(job->src, dtype, segment->data + i);
    return job->residual_in ? g + job->residual_in[segment->residual + i] : g;
}

/* Add at most one block to the totals. */
GC_INLINE void add_block(gc_encode_job *job, int dtype, const gc_segment *segment, uint32_t first,
                         uint32_t numel, gc_block_totals *totals)
{
    double lanes[GC_SUM_LANES] = {0};
    for (uint32_t i = 0; i < numel; i++) {
        float x = corrected(job, dtype, segment, first + i);
        uint32_t magnitude = gc_abs_bits(x);
        lanes[i % GC_SUM_LANES] += (double)x * x;
        totals->absmax_bits = magnitude > totals->absmax_bits ? magnitude : totals->absmax_bits;
        totals->any_gradient |= gc_abs_bits(gc_load(job->src, dtype, segment->data + first + i));
    }
    gc_add_squares(totals, gc_lanes_total(lanes));
}

GC_INLINE void group_body(gc_encode_job *job, int dtype, const gc_segment *segment, gc_run run)
{
    gc_keep_residuals(job, segment, run.first, run.numel);
    gc_block_totals totals = {0, 0, 0};
    double sum_squares = 0;
    for (uint32_t i = 0; i < run.numel; i += GC_BLOCK_NUMEL) {
        gc_next_run(&sum_squares, &totals.sum_squares, i);
        add_block(job, dtype, segment, run.first + i,
                  run.numel - i < GC_BLOCK_NUMEL ? run.numel - i : GC_BLOCK_NUMEL, &totals);
    }
    totals.sum_squares += sum_squares;
    job->nonfinite |= totals.absmax_bits >= GC_INF_BITS;
    gc_block_levels levels = gc_levels_of(&totals, run.numel, job);
    gc_store_u32(job->payload + segment->scales + 4 * (size_t)run.group, gc_bits_of(levels.scale));
    uint8_t *codes = job->payload + segment->codes;
    double all = 0;
    for (uint32_t i = run.first; i < run.first + run.numel; i++) {
        float x = corrected(job, dtype, segment, i);
        uint32_t code = gc_block_code(x, &levels);
        uint64_t bit = (uint64_t)i * job->code_bits;
        /* Writing a code clears what is above it in its byte, so padding is 0. */
        codes[bit / 8] = (uint8_t)((codes[bit / 8] & ~(0xFFu << bit % 8)) | code << bit % 8);
        if (job->residual_out) {
            float left = x - gc_block_value(code, &levels);
            job->residual_out[segment->residual + i] = gc_is_nan(left) ? gc_float_of(GC_NAN_BITS)
                                                                       : job->decay * left;
            all += left < 0 ? -left : left;
        }
    }
    gc_count_dropped(job, all);
}

void gc_block_group(gc_encode_job *job, const gc_segment *segment, gc_run run)
{
    GC_BY_DTYPE(job->dtype, group_body(job, GC_F32, segment, run),
                group_body(job, GC_BF16, segment, run), group_body(job, GC_F16, segment, run));
}

void gc_block_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        gc_block_group(job, segment, run);
        i += run.numel;
    }
    gc_pad_ternary(job, segment);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
