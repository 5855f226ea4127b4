/* api.c - the public kernels: check the arguments, pin the floating-point environment, run the
 * chosen tier.
 *
 * Arguments are checked whole before the first byte is written. Memory is only asked for where
 * there is an element to read or write: a call without elements may pass NULL.
 */
#include <float.h>

#include "checks.h"
#include "entropy.h"
#include "environment.h"
#include "philox.h"

static gc_status run_encode(gc_encode_kernel *kernel, gc_encode_job *job,
                            const gc_segment *segments, size_t segment_count, const void *target,
                            uint32_t *nonfinite)
{
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) ||
        !gc_is_source_dtype(job->dtype) || !nonfinite || (has_elements && (!job->src || !target)))
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    for (size_t s = 0; s < segment_count; s++) {
        if (segments[s].numel)
            kernel(job, &segments[s]);
        if (job->dropped)
            job->dropped++;
    }
    gc_leave_float_environment(saved);
    gc_report(nonfinite, job->nonfinite);
    return GC_OK;
}

static int is_decay(float decay) { return decay > 0 && decay <= 1; }

static gc_status run_decode(gc_decode_kernel *kernel, gc_decode_job *job,
                            const gc_segment *segments, size_t segment_count, uint32_t *nonfinite)
{
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) ||
        !gc_is_source_dtype(job->out_dtype) || !nonfinite || (job->flags & ~(unsigned)GC_STREAM) ||
        !gc_payloads_ok(job->payloads, job->payload_count, has_elements) ||
        (has_elements && !job->out))
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    for (size_t s = 0; s < segment_count; s++)
        if (segments[s].numel)
            kernel(job, &segments[s]);
    gc_leave_float_environment(saved);
    gc_report(nonfinite, job->nonfinite);
    return GC_OK;
}

/* ---- statistics ------------------------------------------------------------------------------ */
gc_status gc_block_sums(const void *src, int dtype, const gc_segment *segments,
                        size_t segment_count, gc_block *blocks, uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src, .dtype = dtype, .blocks = blocks};
    return run_encode(gc_current_kernels()->block_sums, &job, segments, segment_count, blocks,
                      nonfinite);
}

gc_status gc_ternary_scales(const gc_block *blocks, const uint64_t *group_blocks,
                            const uint32_t *group_numels, size_t group_count, double clip_sigma,
                            float *scales)
{
    if (clip_sigma != clip_sigma || (group_count && (!group_blocks || !group_numels || !scales)))
        return GC_INVALID_ARGUMENT;
    for (size_t g = 0; g < group_count; g++)
        if (group_blocks[g] > group_blocks[g + 1] || (!blocks && group_blocks[g + 1]))
            return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    for (size_t g = 0; g < group_count; g++)
        scales[g] = gc_ternary_scale_of(blocks + group_blocks[g],
                                        group_blocks[g + 1] - group_blocks[g], group_numels[g],
                                        clip_sigma);
    gc_leave_float_environment(saved);
    return GC_OK;
}

/* ---- encoders -------------------------------------------------------------------------------- */
gc_status gc_ternary_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, uint8_t *payload, gc_rng_key key,
                            uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src, .dtype = dtype, .payload = payload, .key = key};
    if (key.stream & GC_DEEP_STREAM)
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->ternary_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

gc_status gc_onebit_encode(const void *src, int dtype, const gc_segment *segments,
                           size_t segment_count, const float *residual_in, float *residual_out,
                           float *kept, float decay, double *dropped, const float *means,
                           uint8_t *payload, uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src,
                         .dtype = dtype,
                         .payload = payload,
                         .residual_in = residual_in,
                         .residual_out = residual_out,
                         .kept = residual_in ? kept : NULL,
                         .decay = decay,
                         .dropped = dropped,
                         .means = means};
    if (!is_decay(decay) || (means && !(gc_is_finite(means[0]) && gc_is_finite(means[1]))))
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->onebit_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

gc_status gc_block_encode(const void *src, int dtype, const gc_segment *segments,
                          size_t segment_count, unsigned code_bits, const float *residual_in,
                          float *residual_out, float *kept, float decay, double *dropped,
                          uint8_t *payload, uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src,
                         .dtype = dtype,
                         .payload = payload,
                         .residual_in = residual_in,
                         .residual_out = residual_out,
                         .kept = residual_in ? kept : NULL,
                         .decay = decay,
                         .dropped = dropped,
                         .code_bits = code_bits};
    if (!gc_is_block_bits(code_bits) || !is_decay(decay))
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->block_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

gc_status gc_nearest_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, double step, const float *residual_in,
                            float *residual_out, float *kept, float decay, double *dropped,
                            uint8_t *payload, uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src,
                         .dtype = dtype,
                         .payload = payload,
                         .residual_in = residual_in,
                         .residual_out = residual_out,
                         .kept = residual_in ? kept : NULL,
                         .decay = decay,
                         .dropped = dropped,
                         .code_bits = 2,
                         .step = step};
    if (!(step > 0 && step <= DBL_MAX) || !is_decay(decay))
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->block_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

gc_status gc_entropy_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, uint32_t stream_nbytes, const float *residual_in,
                            float *residual_out, float *kept, float decay, double *dropped,
                            uint8_t *payload, uint32_t *nonfinite)
{
    gc_encode_job job = {.src = src,
                         .dtype = dtype,
                         .payload = payload,
                         .residual_in = residual_in,
                         .residual_out = residual_out,
                         .kept = residual_in ? kept : NULL,
                         .decay = decay,
                         .dropped = dropped,
                         .stream_nbytes = stream_nbytes};
    if (!gc_is_stream_nbytes(stream_nbytes) || !gc_are_streams(segments, segment_count) ||
        !is_decay(decay))
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->entropy_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

gc_status gc_rescale(float *plane, uint64_t numel, float factor)
{
    if (numel && !plane)
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    for (uint64_t i = 0; i < numel; i++)
        plane[i] *= factor;
    gc_leave_float_environment(saved);
    return GC_OK;
}

gc_status gc_values_encode(const void *src, int dtype, const gc_segment *segments,
                           size_t segment_count, int value_dtype, uint8_t *payload,
                           uint32_t *nonfinite)
{
    gc_encode_job job = {
        .src = src, .dtype = dtype, .payload = payload, .value_dtype = value_dtype};
    if (!gc_is_value_dtype(value_dtype))
        return GC_INVALID_ARGUMENT;
    return run_encode(gc_current_kernels()->values_encode, &job, segments, segment_count, payload,
                      nonfinite);
}

/* ---- decoders -------------------------------------------------------------------------------- */
gc_status gc_ternary_sum_decode(const uint8_t *const *payloads, size_t payload_count, int shared,
                                const gc_segment *segments, size_t segment_count, void *out,
                                int out_dtype, unsigned flags, uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = payloads,
                         .payload_count = payload_count,
                         .shared = shared != 0,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    return run_decode(gc_current_kernels()->ternary_decode, &job, segments, segment_count,
                      nonfinite);
}

gc_status gc_onebit_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                               const gc_segment *segments, size_t segment_count, void *out,
                               int out_dtype, unsigned flags, uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = payloads,
                         .payload_count = payload_count,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    return run_decode(gc_current_kernels()->onebit_decode, &job, segments, segment_count,
                      nonfinite);
}

gc_status gc_block_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                              unsigned code_bits, const gc_segment *segments, size_t segment_count,
                              void *out, int out_dtype, unsigned flags, uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = payloads,
                         .payload_count = payload_count,
                         .code_bits = code_bits,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    if (!gc_is_block_bits(code_bits))
        return GC_INVALID_ARGUMENT;
    return run_decode(gc_current_kernels()->block_decode, &job, segments, segment_count, nonfinite);
}

gc_status gc_entropy_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                                uint32_t stream_nbytes, const gc_segment *segments,
                                size_t segment_count, void *out, int out_dtype, unsigned flags,
                                uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = payloads,
                         .payload_count = payload_count,
                         .stream_nbytes = stream_nbytes,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    if (!gc_is_stream_nbytes(stream_nbytes) || !gc_are_streams(segments, segment_count))
        return GC_INVALID_ARGUMENT;
    return run_decode(gc_current_kernels()->entropy_decode, &job, segments, segment_count,
                      nonfinite);
}

gc_status gc_values_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                               int value_dtype, const gc_segment *segments, size_t segment_count,
                               void *out, int out_dtype, unsigned flags, uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = payloads,
                         .payload_count = payload_count,
                         .value_dtype = value_dtype,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    if (!gc_is_value_dtype(value_dtype))
        return GC_INVALID_ARGUMENT;
    return run_decode(gc_current_kernels()->values_decode, &job, segments, segment_count,
                      nonfinite);
}

gc_status gc_lanes_decode(const uint8_t *payload, size_t world_size, unsigned lane_bits,
                          const gc_segment *segments, size_t segment_count, void *out,
                          int out_dtype, unsigned flags, uint32_t *nonfinite)
{
    gc_decode_job job = {.payloads = &payload,
                         .payload_count = 1,
                         .world_size = (uint32_t)world_size,
                         .lane_bits = lane_bits,
                         .out = out,
                         .out_dtype = out_dtype,
                         .flags = flags};
    if (!gc_world_ok(world_size, lane_bits))
        return GC_INVALID_ARGUMENT;
    return run_decode(gc_current_kernels()->lanes_decode, &job, segments, segment_count, nonfinite);
}

gc_status gc_ternary_sum_lanes(const uint8_t *const *payloads, size_t payload_count,
                               const gc_segment *in_segments, const gc_segment *out_segments,
                               size_t segment_count, unsigned lane_bits, uint8_t *out)
{
    const gc_kernels *kernels = gc_current_kernels();
    gc_decode_job job = {
        .payloads = payloads, .payload_count = payload_count, .lane_bits = lane_bits};
    int has_elements, has_lanes;
    if (!gc_segments_ok(in_segments, segment_count, &has_elements) ||
        !gc_segments_ok(out_segments, segment_count, &has_lanes) ||
        !gc_payloads_ok(payloads, payload_count, has_elements) ||
        !gc_world_ok(payload_count, lane_bits) || (has_elements && !out))
        return GC_INVALID_ARGUMENT;
    for (size_t s = 0; s < segment_count; s++)
        if (in_segments[s].start != out_segments[s].start ||
            in_segments[s].numel != out_segments[s].numel)
            return GC_INVALID_ARGUMENT;
    for (size_t s = 0; s < segment_count; s++)
        if (in_segments[s].numel)
            kernels->sum_lanes(&job, &in_segments[s], &out_segments[s], out);
    return GC_OK;
}

/* ---- checks of payloads ---------------------------------------------------------------------- */
gc_status gc_ternary_validate(const uint8_t *payload, const gc_segment *segments,
                              size_t segment_count)
{
    const gc_kernels *kernels = gc_current_kernels();
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) || (has_elements && !payload))
        return GC_INVALID_ARGUMENT;
    gc_status status = GC_OK;
    for (size_t s = 0; s < segment_count && status == GC_OK; s++)
        if (segments[s].numel)
            status = kernels->ternary_validate(payload + segments[s].codes, segments[s].numel);
    return status;
}

gc_status gc_onebit_validate(const uint8_t *payload, const gc_segment *segments,
                             size_t segment_count)
{
    const gc_kernels *kernels = gc_current_kernels();
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) || (has_elements && !payload))
        return GC_INVALID_ARGUMENT;
    gc_status status = GC_OK;
    for (size_t s = 0; s < segment_count && status == GC_OK; s++)
        if (segments[s].numel)
            status = kernels->onebit_validate(payload + segments[s].codes, segments[s].numel);
    return status;
}

gc_status gc_block_validate(const uint8_t *payload, unsigned code_bits, const gc_segment *segments,
                            size_t segment_count)
{
    const gc_kernels *kernels = gc_current_kernels();
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) || (has_elements && !payload) ||
        !gc_is_block_bits(code_bits))
        return GC_INVALID_ARGUMENT;
    gc_status status = GC_OK;
    for (size_t s = 0; s < segment_count && status == GC_OK; s++)
        if (segments[s].numel)
            status = kernels->block_validate(payload + segments[s].codes, segments[s].numel,
                                             code_bits);
    return status;
}

gc_status gc_entropy_validate(const uint8_t *payload, uint32_t stream_nbytes,
                              const gc_segment *segments, size_t segment_count)
{
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) || (has_elements && !payload) ||
        !gc_is_stream_nbytes(stream_nbytes) || !gc_are_streams(segments, segment_count))
        return GC_INVALID_ARGUMENT;
    for (size_t s = 0; s < segment_count; s++) {
        const uint8_t *codes = payload + segments[s].codes;
        for (uint32_t i = 0; i < segments[s].numel;) {
            gc_run run = gc_run_at(&segments[s], i, segments[s].numel);
            if (codes[0] >= GC_TABLE_COUNT)
                return GC_FORBIDDEN_CODE;
            codes += gc_stream_code_nbytes(run.numel, stream_nbytes);
            i += run.numel;
        }
    }
    return GC_OK;
}

gc_status gc_lanes_validate(const uint8_t *payload, size_t world_size, unsigned lane_bits,
                            const gc_segment *segments, size_t segment_count)
{
    const gc_kernels *kernels = gc_current_kernels();
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) || (has_elements && !payload) ||
        !gc_world_ok(world_size, lane_bits))
        return GC_INVALID_ARGUMENT;
    gc_status status = GC_OK;
    for (size_t s = 0; s < segment_count && status == GC_OK; s++)
        if (segments[s].numel)
            status = kernels->lanes_validate(payload + segments[s].codes, segments[s].numel,
                                             (uint32_t)world_size, lane_bits);
    return status;
}

uint32_t gc_crc32c(uint32_t crc, const uint8_t *data, size_t data_nbytes)
{
    return data_nbytes ? gc_current_kernels()->crc32c(crc, data, data_nbytes) : crc;
}

/* ---- copies, random numbers ------------------------------------------------------------------ */
gc_status gc_copy(uint8_t *dst, const uint8_t *src, const gc_copy_range *ranges, size_t range_count)
{
    if (range_count && !ranges)
        return GC_INVALID_ARGUMENT;
    for (size_t r = 0; r < range_count; r++)
        if (ranges[r].nbytes && (!dst || !src))
            return GC_INVALID_ARGUMENT;
    for (size_t r = 0; r < range_count; r++)
        if (ranges[r].nbytes)
            memcpy(dst + ranges[r].dst, src + ranges[r].src, ranges[r].nbytes);
    return GC_OK;
}

void gc_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
    gc_philox(words, key[0], key[1]);
    memcpy(out, words, sizeof words);
}
