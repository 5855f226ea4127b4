/* onebit_groups.c - see onebit_groups.h. */
#include "onebit_groups.h"

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CHUNK_NUMEL = GC_ONEBIT_STAGE_NUMEL, STREAM_NUMEL = 1 << 15 };

/* Encode one group; 0 when it holds a value that is not finite (then no residual was written). */
static int encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run,
                        gc_onebit_stage *stage, const gc_onebit_tier *tier)
{
    gc_onebit_totals totals = {{0, 0}, 0, 0, 0};
    double sums[2] = {0, 0};
    uint64_t residual = segment->residual + run.first;
    gc_onebit_view view = {job->src,
                           job->dtype,
                           segment->data + run.first,
                           job->residual_in ? job->residual_in + residual : NULL,
                           {0, 0},
                           job->decay};
    double left = 0;
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        for (int bit = 0; bit < 2; bit++)
            gc_next_run(&sums[bit], &totals.sums[bit], chunk);
        tier->take(&totals, stage, &view, chunk, numel);
        gc_keep_residuals(job, segment, run.first + chunk, numel);
        gc_put_bits(job->payload + segment->codes, run.first + chunk, stage->bits, numel);
    }
    if (totals.absmax_bits >= GC_INF_BITS)
        return 0;
    uint32_t counts[2] = {run.numel - totals.ones, totals.ones};
    uint8_t *scales = job->payload + segment->scales + 8 * (size_t)run.group;
    for (int bit = 0; bit < 2; bit++) {
        view.means[bit] = 0;
        if (totals.any_gradient && (job->means || counts[bit]))
            view.means[bit] = job->means ? job->means[bit]
                                         : (float)((sums[bit] + totals.sums[bit]) / counts[bit]);
        gc_store_u32(scales + 4 * bit, gc_bits_of(view.means[bit]));
    }
    if (job->residual_out && run.numel <= CHUNK_NUMEL)
        left = tier->leave_staged(stage, &view, run.numel, job->residual_out + residual,
                                  job->residual_out != job->residual_in &&
                                      segment->numel >= STREAM_NUMEL);
    else if (job->residual_out)
        left = tier->leave_again(&view, run.numel, job->residual_out + residual);
    gc_count_dropped(job, left);
    return 1;
}

void gc_encode_onebit_groups(gc_encode_job *job, const gc_segment *segment,
                             const gc_onebit_tier *tier)
{
    gc_onebit_stage stage;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        if (!encode_group(job, segment, run, &stage, tier))
            gc_onebit_group(job, segment, run);
        i += run.numel;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
