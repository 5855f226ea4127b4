/* statistics.c - block sums: sixteen float64 lanes are eight vectors for the sums and eight for the
 * squares. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"

typedef struct {
    float64x2_t sums[8], squares[8]; /* lanes 2j and 2j + 1 in vector j */
    uint32x4_t absmax;
} block_lanes;

GC_INLINE void add2(block_lanes *lanes, int j, float64x2_t d)
{
    lanes->sums[j] = vaddq_f64(lanes->sums[j], d);
    /* the product is exact: fused or not is the same */
    lanes->squares[j] = vfmaq_f64(lanes->squares[j], d, d);
}

/* Elements of the lanes from 2j on. */
GC_INLINE void add8(block_lanes *lanes, int j, gc_eight x)
{
    add2(lanes, j, vcvt_f64_f32(vget_low_f32(x.a)));
    add2(lanes, j + 1, vcvt_high_f64_f32(x.a));
    add2(lanes, j + 2, vcvt_f64_f32(vget_low_f32(x.b)));
    add2(lanes, j + 3, vcvt_high_f64_f32(x.b));
    lanes->absmax = gc_abs_max8(lanes->absmax, x);
}

GC_INLINE gc_block sum_one_block(const void *src, uint64_t first, uint32_t numel, int dtype)
{
    block_lanes lanes;
    for (int j = 0; j < 8; j++)
        lanes.sums[j] = lanes.squares[j] = vdupq_n_f64(0);
    lanes.absmax = vdupq_n_u32(0);
    uint32_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        add8(&lanes, 0, gc_load8(src, dtype, first + i));
        add8(&lanes, 4, gc_load8(src, dtype, first + i + 8));
    }
    if (i < numel) { /* adding +0.0 changes no lane: none is ever -0.0 */
        float rest[16] = {0};
        for (uint32_t j = 0; i + j < numel; j++)
            rest[j] = gc_load(src, dtype, first + i + j);
        add8(&lanes, 0, gc_load8(rest, GC_F32, 0));
        add8(&lanes, 4, gc_load8(rest, GC_F32, 8));
    }
    return (gc_block){gc_total16(lanes.sums), gc_total16(lanes.squares), vmaxvq_u32(lanes.absmax),
                      0};
}

GC_INLINE void sum_blocks(gc_encode_job *job, const gc_segment *segment, int dtype)
{
    gc_block *block = job->blocks + segment->block;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        for (uint32_t j = 0; j < run.numel; j += GC_BLOCK_NUMEL, block++) {
            uint32_t numel = run.numel - j < GC_BLOCK_NUMEL ? run.numel - j : GC_BLOCK_NUMEL;
            *block = sum_one_block(job->src, segment->data + i + j, numel, dtype);
            if (block->absmax_bits >= GC_INF_BITS) {
                *block = gc_block_of(job->src, dtype, segment->data + i + j, numel);
                job->nonfinite = 1;
            }
        }
        i += run.numel;
    }
}

void gc_block_sums_neon(gc_encode_job *job, const gc_segment *segment)
{
    GC_BY_DTYPE(job->dtype, sum_blocks(job, segment, GC_F32), sum_blocks(job, segment, GC_BF16),
                sum_blocks(job, segment, GC_F16));
}
#endif
