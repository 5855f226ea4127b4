/* blocks.h - the levels of a block codec (gc_block_encode, gc_nearest_encode), and what the vector
 * tiers' encoders share: the walk over groups.
 *
 * A group of at most GC_ONEBIT_STAGE_NUMEL elements is read from memory once: x = g + r is staged
 * in the first-level cache for the second pass. Larger groups are staged chunk by chunk and read
 * twice. A staged chunk is encoded while the next one is staged, so that memory need not wait for
 * arithmetic. A group with values that are not finite is left to the portable encoder before its
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
    uint32_t absmax_bits;  /* of x; for 2 bits 0 where all are finite, GC_INF_BITS else */
    uint32_t any_gradient; /* 0 when every |g| is 0 */
} gc_block_totals;

/* Add the sum of a block's squares, which is finite where they all are. */
GC_INLINE void gc_add_squares(gc_block_totals *totals, double sum)
{
    totals->sum_squares += sum;
    if (!(sum <= DBL_MAX))
        totals->absmax_bits = GC_INF_BITS;
}

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
    _Alignas(64) float x[GC_ONEBIT_STAGE_NUMEL + 64];
    uint8_t codes[GC_ONEBIT_STAGE_NUMEL + 64];
} gc_block_stage;

/* The part of the tensors that a group lies in. */
typedef struct {
    const void *src;
    int dtype;
    uint64_t data;
    const float *residual; /* NULL: none */
    unsigned bits;
} gc_block_view;

/* Staged elements that wait for their codes. */
typedef struct {
    const float *x;
    uint8_t *codes;
    gc_block_levels levels;
    unsigned bits;
    float *out;  /* the decayed rest of x is written to it; NULL: not kept */
    float decay; /* of what codes leave out */
    /* write `out` past the caches: it is a plane that is not read before the next step, and lines
     * need not be read first */
    int streams;
} gc_block_staged;

/* Stage x of a block, `numel` elements from element `first` of the group on, and add them to the
 * totals. */
typedef void gc_block_take(gc_block_totals *totals, float *x, const gc_block_view *view,
                           uint32_t first, uint32_t numel);
/* Write the codes of `numel` staged elements and their rest; return the sum of what was left before
 * the decay. May read and encode 64 elements more. */
typedef double gc_block_emit(const gc_block_staged *staged, uint32_t numel);
/* Both, for a multiple of 64 elements each: ternary codes, with residuals before and after. */
typedef double gc_block_both(gc_block_totals *totals, float *x, const gc_block_view *view,
                             uint32_t first, uint32_t numel, const gc_block_staged *staged);
typedef struct {
    gc_block_take *take;
    gc_block_emit *emit;
    gc_block_both *both; /* NULL: no faster than one after the other */
} gc_block_tier;

/* gc_block_take that always adds squares up. */
gc_block_take gc_take_squares_avx2, gc_take_squares_avx512;

void gc_encode_blocks(gc_encode_job *job, const gc_segment *segment, const gc_block_tier *tier);

#endif
