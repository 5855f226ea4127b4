/* block_decode.c - averages of payloads of evenly spaced levels. */
#include "blocks.h"

enum { CHUNK_NUMEL = 256 };

/* Add the values that one payload gives to elements of one group. */
static void add_payload(const gc_decode_job *job, const uint8_t *payload, const gc_segment *segment,
                        gc_run run, float *values, int is_first)
{
    const uint8_t *codes = payload + segment->codes;
    unsigned bits = job->code_bits, mask = (1u << bits) - 1;
    gc_block_levels levels = {
        gc_scale(payload, segment, run.group), 0, gc_block_zero(bits), 0, 0, 0};
    for (uint32_t i = 0; i < run.numel; i++) {
        uint64_t bit = (uint64_t)(run.first + i) * bits;
        float value = gc_block_value(codes[bit / 8] >> bit % 8 & mask, &levels);
        values[i] = is_first ? value : values[i] + value;
    }
}

void gc_block_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                          uint32_t numel)
{
    float values[CHUNK_NUMEL], factor = 1.0f / (float)job->payload_count;
    for (uint32_t i = first, end = first + numel; i < end;) {
        gc_run run = gc_run_at(segment, i, end - i < CHUNK_NUMEL ? end : i + CHUNK_NUMEL);
        for (size_t p = 0; p < job->payload_count; p++)
            add_payload(job, job->payloads[p], segment, run, values, p == 0);
        for (uint32_t j = 0; j < run.numel; j++)
            job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + i + j,
                                       values[j] * factor);
        i += run.numel;
    }
}

void gc_block_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    gc_block_decode_span(job, segment, 0, segment->numel);
}
