/* statistics.c - sums of blocks of a gradient and the ternary scales made of them (Wen et al. 2017,
 * section 3.3).
 *
 * Sums are float64 in an order that the contract pins: 16 lanes inside a block, then a tree over
 * the lanes, so that a vector unit and this loop round alike.
 */
#include <math.h>

#include "numeric.h"

GC_INLINE gc_block block_body(const void *src, int dtype, uint64_t first, uint32_t numel)
{
    double sums[GC_SUM_LANES] = {0}, squares[GC_SUM_LANES] = {0};
    gc_block block = {0, 0, 0, 0};
    for (uint32_t i = 0; i < numel; i++) {
        float value = gc_load(src, dtype, first + i);
        double x = value; /* x * x is exact: 24 + 24 bits */
        sums[i % GC_SUM_LANES] += x;
        squares[i % GC_SUM_LANES] += x * x;
        uint32_t a = gc_abs_bits(value);
        block.absmax_bits = a > block.absmax_bits ? a : block.absmax_bits;
    }
    block.sum = gc_lanes_total(sums);
    block.sum_squares = gc_lanes_total(squares);
    return block;
}

gc_block gc_block_of(const void *src, int dtype, uint64_t first, uint32_t numel)
{
    gc_block block;
    GC_BY_DTYPE(dtype, block = block_body(src, GC_F32, first, numel),
                block = block_body(src, GC_BF16, first, numel),
                block = block_body(src, GC_F16, first, numel));
    /* A sum that is NaN is the one canonical NaN: which one the additions return is up to the
     * compiler. */
    if (isnan(block.sum))
        block.sum = gc_float_of(GC_NAN_BITS);
    if (isnan(block.sum_squares))
        block.sum_squares = gc_float_of(GC_NAN_BITS);
    return block;
}

void gc_block_sums_portable(gc_encode_job *job, const gc_segment *segment)
{
    gc_block *block = job->blocks + segment->block;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        for (uint32_t j = 0; j < run.numel; j += GC_BLOCK_NUMEL, block++) {
            uint32_t left = run.numel - j;
            *block = gc_block_of(job->src, job->dtype, segment->data + i + j,
                                 left < GC_BLOCK_NUMEL ? left : GC_BLOCK_NUMEL);
            job->nonfinite |= block->absmax_bits >= GC_INF_BITS;
        }
        i += run.numel;
    }
}

float gc_ternary_scale_of(const gc_block *blocks, uint64_t block_count, uint32_t numel,
                          double clip_sigma)
{
    double sum = 0, squares = 0, run_sum = 0, run_squares = 0;
    uint32_t absmax_bits = 0;
    for (uint64_t b = 0; b < block_count; b++) {
        gc_next_run(&sum, &run_sum, (uint32_t)(b * GC_BLOCK_NUMEL));
        gc_next_run(&squares, &run_squares, (uint32_t)(b * GC_BLOCK_NUMEL));
        run_sum += blocks[b].sum;
        run_squares += blocks[b].sum_squares;
        if (blocks[b].absmax_bits > absmax_bits)
            absmax_bits = blocks[b].absmax_bits;
    }
    sum += run_sum;
    squares += run_squares;
    float absmax = gc_float_of(absmax_bits);
    if (numel == 0)
        return 0;
    if (clip_sigma <= 0 || absmax_bits >= GC_INF_BITS)
        return absmax;
    double mean = sum / numel, variance = squares / numel - mean * mean;
    double deviation = sqrt(variance > 0 ? variance : 0), beyond = fabs(mean) - deviation;
    /* of a group without deviation |x| */
    float clipped = (float)(clip_sigma * deviation + (beyond > 0 ? beyond : 0));
    return clipped < absmax ? clipped : absmax;
}
