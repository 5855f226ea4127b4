/* blocks.c - see blocks.h. */
#include "blocks.h"

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CHUNK_NUMEL = GC_ONEBIT_STAGE_NUMEL, STREAM_NUMEL = 1 << 15 };

/* Encode one group; 0 when it holds a value that is not finite (then no residual was written). */
static int encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run,
                        gc_block_stage *stage, const gc_block_tier *tier)
{
    gc_block_totals totals = {0, 0, 0}, again;
    uint64_t residual = segment->residual + run.first;
    gc_block_view view = {job->src,
                          job->dtype,
                          segment->data + run.first,
                          job->residual_in ? job->residual_in + residual : NULL,
                          job->code_bits,
                          job->decay};
    double left = 0, sum_squares = 0;
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        gc_next_run(&sum_squares, &totals.sum_squares, chunk);
        tier->take(&totals, stage, &view, chunk, numel);
        gc_keep_residuals(job, segment, run.first + chunk, numel);
    }
    if (totals.absmax_bits >= GC_INF_BITS)
        return 0;
    totals.sum_squares += sum_squares;
    gc_block_levels levels = gc_levels_of(&totals, run.numel, job);
    gc_store_u32(job->payload + segment->scales + 4 * (size_t)run.group, gc_bits_of(levels.scale));
    int streams = job->residual_out != job->residual_in && segment->numel >= STREAM_NUMEL;
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        if (run.numel > CHUNK_NUMEL)
            tier->take(&again, stage, &view, chunk, numel);
        left += tier->emit(stage, &view, &levels, numel,
                           job->residual_out ? job->residual_out + residual + chunk : NULL,
                           streams);
        gc_put_bits(job->payload + segment->codes, (uint64_t)(run.first + chunk) * job->code_bits,
                    stage->codes, (size_t)numel * job->code_bits);
    }
    gc_count_dropped(job, left);
    return 1;
}

void gc_encode_blocks(gc_encode_job *job, const gc_segment *segment, const gc_block_tier *tier)
{
    gc_block_stage stage;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        if (!encode_group(job, segment, run, &stage, tier))
            gc_block_group(job, segment, run);
        i += run.numel;
    }
    gc_pad_ternary(job, segment);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
