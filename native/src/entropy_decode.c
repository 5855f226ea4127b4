/* entropy_decode.c - averages of streams of entropy-coded codes: which streams are read together,
 * and what becomes of their codes. Any bytes are safe to decode.
 */
#include "entropy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static void add_stream(float *values, const gc_stream_codes *codes, const gc_stream *from,
                       const gc_entropy_decoder *decoder, int is_first)
{
    decoder->add(values, codes->codes, from->numel, from->scale, is_first);
    for (uint32_t i = 0; i < codes->escaped_count; i++) {
        const gc_escaped *one = &codes->escaped[i];
        uint32_t at = 2 * one->pair;
        values[at] += (float)one->a * from->scale;
        if (at + 1 < from->numel)
            values[at + 1] += (float)one->b * from->scale;
    }
}

static gc_stream stream_of(const gc_decode_job *job, const uint8_t *payload,
                           const gc_segment *segment, gc_run run, size_t offset)
{
    return (gc_stream){payload + segment->codes + offset, run.numel,
                       (uint32_t)gc_stream_code_nbytes(run.numel, job->stream_nbytes),
                       gc_scale(payload, segment, run.group)};
}

/* Write the values of one stream, elements from `first` of the segment on. */
static void write_stream(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                         const gc_stream_codes *codes, const gc_stream *from, float *values,
                         const gc_entropy_decoder *decoder)
{
    int is_small = from->scale >= 0 && from->scale <= FLT_MAX / 32768;
    if (!decoder->write_codes || job->out_dtype != GC_F32 || !is_small) {
        add_stream(values, codes, from, decoder, 1);
        decoder->write(job, segment, first, from->numel, values, 1.0f);
        return;
    }
    decoder->write_codes(job, segment, first, from->numel, codes->codes, from->scale);
    float *out = (float *)job->out + segment->data + first;
#if defined(__x86_64__)
    if (codes->escaped_count && (job->flags & GC_STREAM))
        _mm_sfence(); /* streaming stores have no order */
#endif
    for (uint32_t i = 0; i < codes->escaped_count; i++) {
        const gc_escaped *one = &codes->escaped[i];
        uint32_t at = 2 * one->pair;
        /* added to the 0 that stands there, as add_stream does */
        float zero = 0.0f * from->scale;
        out[at] = zero + (float)one->a * from->scale;
        if (at + 1 < from->numel)
            out[at + 1] = zero + (float)one->b * from->scale;
    }
}

/* One payload: two groups at a time. */
static void decode_one(gc_decode_job *job, const gc_segment *segment,
                       const gc_entropy_decoder *decoder)
{
    gc_stream_codes codes[2];
    float values[GC_STREAM_NUMEL + 64];
    size_t offset = 0;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_stream from[2];
        int count = 0;
        uint32_t first = i;
        for (; count < 2 && i < segment->numel; count++) {
            gc_run run = gc_run_at(segment, i, segment->numel);
            from[count] = stream_of(job, job->payloads[0], segment, run, offset);
            offset += from[count].code_nbytes;
            i += run.numel;
        }
        decoder->read(&from[0], count == 2 ? &from[1] : NULL, codes);
        for (int k = 0; k < count; k++) {
            write_stream(job, segment, first, &codes[k], &from[k], values, decoder);
            first += from[k].numel;
        }
    }
}

/* Several: two payloads at a time, added in order. */
static void decode_several(gc_decode_job *job, const gc_segment *segment,
                           const gc_entropy_decoder *decoder)
{
    gc_stream_codes codes[2];
    float values[GC_STREAM_NUMEL + 64], factor = 1.0f / (float)job->payload_count;
    size_t offset = 0;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        for (size_t p = 0; p < job->payload_count; p += 2) {
            int has_next = p + 1 < job->payload_count;
            gc_stream from[2] = {stream_of(job, job->payloads[p], segment, run, offset)};
            if (has_next)
                from[1] = stream_of(job, job->payloads[p + 1], segment, run, offset);
            decoder->read(&from[0], has_next ? &from[1] : NULL, codes);
            add_stream(values, &codes[0], &from[0], decoder, p == 0);
            if (has_next)
                add_stream(values, &codes[1], &from[1], decoder, 0);
        }
        decoder->write(job, segment, i, run.numel, values, factor);
        offset += gc_stream_code_nbytes(run.numel, job->stream_nbytes);
        i += run.numel;
    }
}

void gc_decode_streams(gc_decode_job *job, const gc_segment *segment,
                       const gc_entropy_decoder *decoder)
{
    if (job->payload_count == 1)
        decode_one(job, segment, decoder);
    else
        decode_several(job, segment, decoder);
#if defined(__x86_64__)
    if (job->flags & GC_STREAM)
        _mm_sfence();
#endif
}
