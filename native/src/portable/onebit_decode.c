/* onebit_decode.c - averages of 1-bit payloads (Seide et al. 2014, section 2). */
#include "numeric.h"

enum { CHUNK_NUMEL = 256 };

/* Add the values that one payload gives to elements of one group. */
static void add_payload(const uint8_t *payload, const gc_segment *segment, gc_run run,
                        float *values, int is_first)
{
    const uint8_t *codes = payload + segment->codes;
    float means[2] = {gc_scale(payload, segment, 2 * run.group),
                      gc_scale(payload, segment, 2 * run.group + 1)};
    for (uint32_t i = 0; i < run.numel; i++) {
        uint32_t at = run.first + i;
        float value = means[codes[at / 8] >> at % 8 & 1];
        values[i] = is_first ? value : values[i] + value;
    }
}

void gc_onebit_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                           uint32_t numel)
{
    float values[CHUNK_NUMEL], factor = 1.0f / (float)job->payload_count;
    for (uint32_t i = first, end = first + numel; i < end;) {
        gc_run run = gc_run_at(segment, i, end - i < CHUNK_NUMEL ? end : i + CHUNK_NUMEL);
        for (size_t p = 0; p < job->payload_count; p++)
            add_payload(job->payloads[p], segment, run, values, p == 0);
        for (uint32_t j = 0; j < run.numel; j++)
            job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + i + j,
                                       values[j] * factor);
        i += run.numel;
    }
}

void gc_onebit_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    gc_onebit_decode_span(job, segment, 0, segment->numel);
}
