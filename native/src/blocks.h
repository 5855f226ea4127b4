/* blocks.h - the levels of a block codec (gc_block_encode, gc_nearest_encode), and what the vector
 * tiers' encoders share: the walk over groups.
 *
 * A group of at most GC_ONEBIT_STAGE_NUMEL elements is read from memory once: x = g + r is staged
 * in the first-level cache for the second pass. Larger groups are staged chunk by chunk and read
 * twice. A group with values that are not finite is left to the portable encoder before its
 * residual is touched.
 */
#ifndef GC_BLOCKS_H
#define GC_BLOCKS_H

#include <float.h>
#include <math.h>

#include "numeric.h"

/* Adding it to 0 <= t < 2^22 leaves t, rounded to nearest even, in the low bits. */
#define GC_ROUNDING_MAGIC 0x1.8p23f

/* How a group of codes stands for values: fl((code - zero) * scale), code 0 .. top. */
typedef struct {
    float scale, inverse; /* S and fl(1 / S), both 0 where S is */
    float zero, top;
    /* of ternary codes: what |x| must exceed not to be 0; infinite where S is 0 */
    float half;
    int ternary; /* codes are rounded by comparison with `half` */
} gc_block_levels;

GC_INLINE float gc_block_zero(unsigned bits)
{
    return bits == 2 ? 1.5f : bits == 4 ? 7.0f : 127.0f;
}

/* What the first pass over a group finds. */
typedef struct {
    double sum_squares;    /* of x, of the run under way (GC_RUN_NUMEL); for 2 bits alone */
    uint32_t absmax_bits;  /* of x */
    uint32_t any_gradient; /* 0 when every |g| is 0 */
} gc_block_totals;

GC_INLINE gc_block_levels gc_levels_of(const gc_block_totals *totals, uint32_t numel,
                                       const gc_encode_job *job)
{
    unsigned bits = job->code_bits;
    int ternary = job->step > 0;
    float zero = ternary ? 1.0f : gc_block_zero(bits),
          most = ternary ? FLT_MAX : FLT_MAX / (2 * zero);
    gc_block_levels levels = {0, 0, zero, 2 * zero, gc_float_of(GC_INF_BITS), ternary};
    if (totals->absmax_bits >= GC_INF_BITS) {
        levels.scale = gc_float_of(GC_NAN_BITS);
        return levels;
    }
    double step = ternary ? job->step : GC_BLOCK2_STEP;
    float scale = bits == 2 ? (float)(step * sqrt(totals->sum_squares / numel))
                            : gc_float_of(totals->absmax_bits) / levels.zero;
    if (!totals->any_gradient || scale < FLT_MIN)
        return levels;
    levels.scale = scale < most ? scale : most;
    levels.inverse = 1.0f / levels.scale;
    levels.half = levels.scale * 0.5f;
    return levels;
}

/* Code of x. A comparison with NaN is false. */
GC_INLINE uint32_t gc_block_code(float x, const gc_block_levels *levels)
{
    if (levels->ternary)
        return 1u + (x > levels->half) - (x < -levels->half);
    float t = x * levels->inverse + levels->zero;
    t = t > 0 ? t : 0;
    t = t < levels->top ? t : levels->top;
    return gc_bits_of(t + GC_ROUNDING_MAGIC) & 0xFF;
}

GC_INLINE float gc_block_value(uint32_t code, const gc_block_levels *levels)
{
    return ((float)code - levels->zero) * levels->scale;
}

/* ---- the walk of the vector tiers ------------------------------------------------------------ */
/* One chunk of x and its codes; vectors may write 64 elements beyond its end within the arrays. */
typedef struct {
    float x[GC_ONEBIT_STAGE_NUMEL + 64];
    uint8_t codes[GC_ONEBIT_STAGE_NUMEL + 64];
} gc_block_stage;

/* The part of the tensors that a group lies in. */
typedef struct {
    const void *src;
    int dtype;
    uint64_t data;
    const float *residual; /* NULL: none */
    unsigned bits;
    float decay; /* of what codes leave out */
} gc_block_view;

typedef struct {
    /* Stage `numel` elements from element `chunk` of the group on, with zeros up to a multiple of
     * 64, and add them to the totals, block by block. */
    void (*take)(gc_block_totals *totals, gc_block_stage *stage, const gc_block_view *view,
                 uint32_t chunk, uint32_t numel);
    /* Write the codes of the staged elements to stage->codes; with `out`, the decayed rest of x to
     * it, and return the sum of what was left before the decay. `streams` writes past the caches,
     * for a plane that is not read before the next step, which saves reading each line first. */
    double (*emit)(gc_block_stage *stage, const gc_block_view *view, const gc_block_levels *levels,
                   uint32_t numel, float *out, int streams);
} gc_block_tier;

/* gc_block_tier.take that always adds squares up. */
typedef void gc_take_squares(gc_block_totals *totals, gc_block_stage *stage,
                             const gc_block_view *view, uint32_t chunk, uint32_t numel);
gc_take_squares gc_take_squares_avx2, gc_take_squares_avx512;

void gc_encode_blocks(gc_encode_job *job, const gc_segment *segment, const gc_block_tier *tier);

#endif
