/* superblocks.c - see superblocks.h. */
#include "superblocks.h"

void gc_recheck_superblock(const gc_encode_job *job, const gc_segment *segment, uint32_t position,
                           const uint16_t distance[GC_SUPERBLOCK_NUMEL])
{
    for (uint32_t k = 0; k < GC_SUPERBLOCK_NUMEL; k++) {
        if (distance[k] > GC_OPEN_DISTANCE)
            continue;
        uint32_t at = position + k;
        gc_run run = gc_run_at(segment, at, segment->numel);
        unsigned code = gc_ternary_code(gc_load(job->src, job->dtype, segment->data + at),
                                        gc_scale(job->payload, segment, run.group),
                                        segment->start + at, segment->parameter, &job->key);
        uint8_t *byte = job->payload + segment->codes + at / 4;
        *byte = (uint8_t)((*byte & ~(3u << 2 * (at % 4))) | code << 2 * (at % 4));
    }
}

/* 65536 / S; 0 for what is no scale, so that every code is 0; Inf when S is too small for this. */
static float factor_of(const gc_encode_job *job, const gc_segment *segment, uint32_t group)
{
    float scale = gc_scale(job->payload, segment, group);
    return scale > 0 ? 65536.0f / scale : 0;
}

/* Factors of the elements of one superblock. Returns whether all are finite. */
static int fill_factors(const gc_encode_job *job, const gc_segment *segment, uint32_t first,
                        float *factors)
{
    float largest = 0;
    for (uint32_t i = 0; i < GC_SUPERBLOCK_NUMEL;) {
        gc_run run = gc_run_at(segment, first + i, first + GC_SUPERBLOCK_NUMEL);
        float factor = factor_of(job, segment, run.group);
        largest = factor > largest ? factor : largest;
        for (uint32_t end = i + run.numel; i < end; i++)
            factors[i] = factor;
    }
    return gc_is_finite(largest);
}

static void encode_whole(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                         uint32_t end, gc_superblocks_kernel *encode)
{
    float factors[GC_SUPERBLOCK_NUMEL];
    gc_philox_plan plan = gc_plan_philox(segment->parameter, &job->key);
    for (uint32_t i = first; i < end;) {
        gc_run run = gc_run_at(segment, i, end);
        gc_superblocks blocks = {i, run.numel / GC_SUPERBLOCK_NUMEL, factors,
                                 run.numel >= GC_SUPERBLOCK_NUMEL};
        int is_usable;
        if (blocks.is_uniform)
            is_usable = gc_is_finite(factors[0] = factor_of(job, segment, run.group));
        else
            is_usable = fill_factors(job, segment, i, factors), blocks.count = 1;
        if (is_usable)
            encode(job, segment, &plan, &blocks);
        else
            gc_ternary_encode_span(job, segment, i, blocks.count * GC_SUPERBLOCK_NUMEL);
        i += blocks.count * GC_SUPERBLOCK_NUMEL;
    }
}

void gc_encode_superblocks(gc_encode_job *job, const gc_segment *segment,
                           gc_superblocks_kernel *encode)
{
    uint32_t head = (GC_SUPERBLOCK_NUMEL - segment->start % GC_SUPERBLOCK_NUMEL) %
                    GC_SUPERBLOCK_NUMEL;
    head = head < segment->numel ? head : segment->numel;
    uint32_t end = head + (segment->numel - head) / GC_SUPERBLOCK_NUMEL * GC_SUPERBLOCK_NUMEL;
    if (head)
        gc_ternary_encode_span(job, segment, 0, head);
    if (head < end)
        encode_whole(job, segment, head, end, encode);
    if (end < segment->numel)
        gc_ternary_encode_span(job, segment, end, segment->numel - end);
}
