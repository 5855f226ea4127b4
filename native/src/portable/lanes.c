/* lanes.c - exact integer lanes: averages from sums of ternary codes, and the check of received
 * lanes. */
#include "lanes.h"

void gc_lanes_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                          uint32_t numel)
{
    const uint8_t *lanes = job->payloads[0] + segment->codes;
    for (uint32_t i = first, end = first + numel; i < end;) {
        gc_run run = gc_run_at(segment, i, end);
        float step = gc_scale(job->payloads[0], segment, run.group) / (float)job->world_size;
        for (; i < run.first + run.numel; i++) {
            int32_t k = (int32_t)gc_lane_at(lanes, i, job->lane_bits) - (int32_t)job->world_size;
            job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + i,
                                       step * (float)k);
        }
    }
}

void gc_lanes_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    gc_lanes_decode_span(job, segment, 0, segment->numel);
}

gc_status gc_lanes_validate_portable(const uint8_t *lanes, uint32_t numel, uint32_t world_size,
                                     unsigned lane_bits)
{
    for (uint32_t i = 0; i < numel; i++)
        if (gc_lane_at(lanes, i, lane_bits) > 2 * world_size)
            return GC_LANE_RANGE;
    unsigned used = (unsigned)((uint64_t)numel * lane_bits % 8);
    if (used && lanes[gc_code_nbytes(numel, lane_bits) - 1] >> used)
        return GC_BAD_PADDING;
    return GC_OK;
}
