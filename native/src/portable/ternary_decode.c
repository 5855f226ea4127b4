/* ternary_decode.c - averages of ternary payloads (Wen et al. 2017, equation 5), as values and as
 * integer lanes. */
#include "lanes.h"
#include "numeric.h"

enum { CHUNK_NUMEL = 256 };

GC_INLINE int32_t code_at(const uint8_t *codes, uint32_t i)
{
    return codes[i / 4] >> 2 * (i % 4) & 3;
}

/* Sums of the codes (0, 1, 2: the value plus one) of elements [first, first + numel) over all
 * payloads. */
static void code_sums(const gc_decode_job *job, uint64_t codes, uint32_t first, uint32_t numel,
                      int32_t *sums)
{
    for (uint32_t i = 0; i < numel; i++)
        sums[i] = 0;
    for (size_t p = 0; p < job->payload_count; p++)
        for (uint32_t i = 0; i < numel; i++)
            sums[i] += code_at(job->payloads[p] + codes, first + i);
}

/* One scale for all: k is an integer, so the average is one rounding of S / count and one of the
 * product. */
static void average_shared(const gc_decode_job *job, const gc_segment *segment, gc_run run,
                           float *values)
{
    int32_t sums[CHUNK_NUMEL];
    float step = gc_scale(job->payloads[0], segment, run.group) / (float)job->payload_count;
    code_sums(job, segment->codes, run.first, run.numel, sums);
    for (uint32_t i = 0; i < run.numel; i++)
        values[i] = step * (float)(sums[i] - (int32_t)job->payload_count);
}

/* A scale for each payload: decoded values are added in payload order. */
static void average_own(const gc_decode_job *job, const gc_segment *segment, gc_run run,
                        float *values)
{
    for (size_t p = 0; p < job->payload_count; p++) {
        const uint8_t *codes = job->payloads[p] + segment->codes;
        float scale = gc_scale(job->payloads[p], segment, run.group);
        for (uint32_t i = 0; i < run.numel; i++) {
            float value = (float)(code_at(codes, run.first + i) - 1) * scale;
            values[i] = p == 0 ? value : values[i] + value;
        }
    }
    float factor = 1.0f / (float)job->payload_count; /* 1 for one payload, which changes no value */
    for (uint32_t i = 0; i < run.numel; i++)
        values[i] *= factor;
}

void gc_ternary_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                            uint32_t numel)
{
    float values[CHUNK_NUMEL];
    for (uint32_t i = first, end = first + numel; i < end;) {
        gc_run run = gc_run_at(segment, i, end - i < CHUNK_NUMEL ? end : i + CHUNK_NUMEL);
        if (job->shared)
            average_shared(job, segment, run, values);
        else
            average_own(job, segment, run, values);
        for (uint32_t j = 0; j < run.numel; j++)
            job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + i + j, values[j]);
        i += run.numel;
    }
}

void gc_ternary_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    gc_ternary_decode_span(job, segment, 0, segment->numel);
}

void gc_sum_lanes_span(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                       uint8_t *lanes, uint32_t first, uint32_t numel)
{
    int32_t sums[CHUNK_NUMEL];
    gc_lane_writer writer = gc_lane_writer_at(lanes + out->codes, first, job->lane_bits);
    for (uint32_t i = first, end = first + numel; i < end; i += CHUNK_NUMEL) {
        uint32_t n = end - i < CHUNK_NUMEL ? end - i : CHUNK_NUMEL;
        code_sums(job, in->codes, i, n, sums);
        for (uint32_t j = 0; j < n; j++) /* the sum of the codes is k + payload_count: the lane */
            gc_lane_write(&writer, (uint32_t)sums[j]);
    }
    gc_lane_flush(&writer);
}

void gc_sum_lanes_portable(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                           uint8_t *lanes)
{
    gc_sum_lanes_span(job, in, out, lanes, 0, in->numel);
}
