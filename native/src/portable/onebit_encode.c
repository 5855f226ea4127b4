/* onebit_encode.c - one bit a value with error feedback (Seide et al. 2014, section 2).
 *
 * Two passes over a group: the first takes the bits and the means of the two classes, the second
 * leaves what the decoder will miss in the residual. Deviation from the paper: a group whose
 * gradient is zero throughout is sent as zeros and keeps its residual, so that an unused row
 * gathers no error.
 */
#include "numeric.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct {
    double sums[2], runs[2];
    uint32_t counts[2];
    int gradient_zero; /* every g of the group is +-0 */
} class_totals;

GC_INLINE float corrected(const gc_encode_job *job, int dtype, const gc_segment *segment,
                          uint32_t i)
{
    float g = gc_load(job->src, dtype, segment->data + i);
    return job->residual_in ? g + job->residual_in[segment->residual + i] : g;
}

/* Bits of elements [first, first + numel), at most one block; adds the sums of both classes to the
 * totals. */
GC_INLINE void block_bits(gc_encode_job *job, int dtype, const gc_segment *segment, uint32_t first,
                          uint32_t numel, class_totals *totals)
{
    uint8_t *codes = job->payload + segment->codes;
    double lanes[2][GC_SUM_LANES] = {{0}};
    for (uint32_t i = 0; i < numel; i++) {
        uint32_t at = first + i;
        float x = corrected(job, dtype, segment, at);
        unsigned bit = x > 0;
        /* Writing a bit clears those above it in its byte, so padding is 0. */
        codes[at / 8] = (uint8_t)((codes[at / 8] & ~(0xFFu << at % 8)) | bit << at % 8);
        lanes[bit][i % GC_SUM_LANES] += x;
        totals->counts[bit]++;
        totals->gradient_zero &= gc_abs_bits(gc_load(job->src, dtype, segment->data + at)) == 0;
        job->nonfinite |= !gc_is_finite(x);
    }
    totals->runs[0] += gc_lanes_total(lanes[0]);
    totals->runs[1] += gc_lanes_total(lanes[1]);
}

static float class_mean(const gc_encode_job *job, const class_totals *totals, int bit)
{
    if (totals->gradient_zero)
        return 0;
    if (job->means)
        return job->means[bit];
    if (totals->counts[bit] == 0)
        return 0;
    float mean = (float)(totals->sums[bit] / totals->counts[bit]);
    return gc_is_nan(mean) ? gc_float_of(GC_NAN_BITS) : mean;
}

/* Nobody reads the copy soon: stores past the caches save reading its lines first. The
 * caller fences. */
void gc_keep_residuals(const gc_encode_job *job, const gc_segment *segment, uint32_t first,
                       uint32_t numel)
{
    if (!job->kept)
        return;
    const float *src = job->residual_in + segment->residual + first;
    float *dst = job->kept + segment->residual + first;
    uint32_t i = 0;
#if defined(__x86_64__)
    if ((uintptr_t)dst % 16 == 0)
        for (; i + 4 <= numel; i += 4)
            _mm_stream_ps(dst + i, _mm_loadu_ps(src + i));
#endif
    if (i < numel)
        memcpy(dst + i, src + i, 4 * (size_t)(numel - i));
}

GC_INLINE void group_body(gc_encode_job *job, int dtype, const gc_segment *segment, gc_run run)
{
    gc_keep_residuals(job, segment, run.first, run.numel);
    class_totals totals = {{0, 0}, {0, 0}, {0, 0}, 1};
    for (uint32_t i = 0; i < run.numel; i += GC_BLOCK_NUMEL) {
        for (int bit = 0; bit < 2; bit++)
            gc_next_run(&totals.sums[bit], &totals.runs[bit], i);
        block_bits(job, dtype, segment, run.first + i,
                   run.numel - i < GC_BLOCK_NUMEL ? run.numel - i : GC_BLOCK_NUMEL, &totals);
    }
    for (int bit = 0; bit < 2; bit++)
        totals.sums[bit] += totals.runs[bit];
    float means[2] = {class_mean(job, &totals, 0), class_mean(job, &totals, 1)};
    uint8_t *scales = job->payload + segment->scales + 8 * (size_t)run.group;
    gc_store_u32(scales, gc_bits_of(means[0]));
    gc_store_u32(scales + 4, gc_bits_of(means[1]));
    if (!job->residual_out)
        return;
    double all = 0;
    for (uint32_t i = run.first; i < run.first + run.numel; i++) {
        float x = corrected(job, dtype, segment, i), left = x - means[x > 0];
        job->residual_out[segment->residual + i] = gc_is_nan(left) ? gc_float_of(GC_NAN_BITS)
                                                                   : job->decay * left;
        all += left < 0 ? -left : left;
    }
    gc_count_dropped(job, all);
}

void gc_onebit_group(gc_encode_job *job, const gc_segment *segment, gc_run run)
{
    GC_BY_DTYPE(job->dtype, group_body(job, GC_F32, segment, run),
                group_body(job, GC_BF16, segment, run), group_body(job, GC_F16, segment, run));
}

void gc_onebit_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        gc_onebit_group(job, segment, run);
        i += run.numel;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
