/* update.c - weight updates: check the arguments, bring gradients a stage at a time, run the chosen
 * tier's rules.
 *
 * Averages that come from payloads are decoded into a stage that stays in the first-level cache and
 * are used up at once, so that no averaged gradient is written to memory.
 */
#include "update.h"

#include <string.h>

#include "checks.h"
#include "entropy.h"
#include "environment.h"

/* ---- checks ---------------------------------------------------------------------------------- */
static int gradients_ok(const gc_gradients *gradients, int has_elements)
{
    if (!gradients || gradients->from < GC_FROM_TENSORS || gradients->from > GC_FROM_ENTROPY)
        return 0;
    if (gradients->from == GC_FROM_TENSORS)
        return 1;
    if (!gc_is_value_dtype(gradients->dtype) || !gc_is_value_dtype(gradients->value_dtype) ||
        !gc_payloads_ok(gradients->payloads, gradients->payload_count, has_elements))
        return 0;
    if (gradients->from == GC_FROM_BLOCK)
        return gc_is_block_bits(gradients->code_bits);
    if (gradients->from == GC_FROM_ENTROPY)
        return gc_is_stream_nbytes(gradients->stream_nbytes);
    return gradients->from != GC_FROM_LANES ||
           (gradients->payload_count == 1 &&
            gc_world_ok(gradients->world_size, gradients->lane_bits));
}

static int target_ok(const gc_target *target, const gc_rule *rule, int from, const double *norms)
{
    if (rule->kind > GC_SQUARES || rule->rounding > GC_NEAREST ||
        (gc_adds_up(rule->kind) && !norms))
        return 0;
    if (gc_adds_up(rule->kind) && rule->kind != GC_SQUARES && from != GC_FROM_TENSORS)
        return 0; /* segments of payloads begin anywhere */
    if (gc_reads_gradient(rule->kind) && from == GC_FROM_TENSORS &&
        (!target->gradient || !gc_is_value_dtype((int)target->gradient_dtype)))
        return 0;
    return (!gc_touches_weight(rule->kind) || target->weight) &&
           (!gc_uses_state0(rule) || target->state0) &&
           (!gc_uses_state1(rule->kind) || target->state1);
}

static int update_ok(const gc_gradients *gradients, const gc_segment *segments,
                     size_t segment_count, const gc_target *targets, size_t target_count,
                     const gc_rule *rules, size_t rule_count, const double *norms,
                     const uint32_t *nonfinite)
{
    int has_elements;
    if (!gc_segments_ok(segments, segment_count, &has_elements) ||
        !gradients_ok(gradients, has_elements) || !nonfinite ||
        (gradients->from == GC_FROM_ENTROPY && !gc_are_streams(segments, segment_count)) ||
        (has_elements && (!targets || !rules)))
        return 0;
    for (size_t s = 0; s < segment_count; s++) {
        const gc_segment *segment = &segments[s];
        if (!segment->numel)
            continue;
        if (segment->parameter >= target_count)
            return 0;
        const gc_target *target = &targets[segment->parameter];
        if (target->rule == GC_NO_RULE)
            continue;
        if (target->rule >= rule_count ||
            !target_ok(target, &rules[target->rule], gradients->from, norms))
            return 0;
    }
    return 1;
}

/* ---- gradients from payloads ----------------------------------------------------------------- */
/* How the codes of a form lie in a payload, and what decodes them. */
typedef struct {
    gc_decode_kernel *decode;
    unsigned bits, scales_per_group;
    uint32_t stream_nbytes; /* of streams: they have no bits an element, and are decoded whole */
} form;

static form form_of(const gc_gradients *gradients)
{
    const gc_kernels *kernels = gc_current_kernels();
    switch (gradients->from) {
    case GC_FROM_TERNARY:
        return (form){kernels->ternary_decode, 2, 1, 0};
    case GC_FROM_ONEBIT:
        return (form){kernels->onebit_decode, 1, 2, 0};
    case GC_FROM_BLOCK:
        return (form){kernels->block_decode, gradients->code_bits, 1, 0};
    case GC_FROM_ENTROPY:
        return (form){kernels->entropy_decode, 0, 1, gradients->stream_nbytes};
    case GC_FROM_LANES:
        return (form){kernels->lanes_decode, gradients->lane_bits, 1, 0};
    default:
        return (form){kernels->values_decode, gradients->value_dtype == GC_F32 ? 32 : 16, 0, 0};
    }
}

/* Elements [first, first + numel) of a segment as a segment of a tensor of their own; `first` is a
 * multiple of 8, of streams the first element of one. */
static gc_segment part_of(const gc_segment *segment, const form *form, uint32_t first,
                          uint32_t numel)
{
    gc_segment part = *segment;
    uint32_t skipped = (segment->start + first) / segment->group_numel -
                       segment->start / segment->group_numel;
    part.data = 0;
    part.codes += form->stream_nbytes
                      ? gc_streams_code_nbytes(segment->start, first, form->stream_nbytes)
                      : (uint64_t)first * form->bits / 8;
    part.scales += 4 * (uint64_t)form->scales_per_group * skipped;
    part.start += first;
    part.numel = numel;
    return part;
}

/* ---- the walk -------------------------------------------------------------------------------- */
static void *at(uint64_t address, uint64_t first, size_t size)
{
    return (void *)(uintptr_t)(address + first * size);
}

static gc_update_span span_of(const gc_target *target, const gc_rule *rule, uint32_t first,
                              uint32_t numel)
{
    gc_update_span span = {
        .rule = rule, .numel = numel, .gradient_dtype = (int)target->gradient_dtype};
    span.weight = at(target->weight, first, target->trail ? 2 : 4);
    span.trail = target->trail ? at(target->trail, first, 2) : NULL;
    span.state0 = target->state0 ? at(target->state0, first, 4) : NULL;
    span.state1 = target->state1 ? at(target->state1, first, 4) : NULL;
    span.gradient = at(target->gradient, first, target->gradient_dtype == GC_F32 ? 4 : 2);
    return span;
}

/* Which of several NaNs a sum keeps depends on the tier: here they are all one. */
static double norm_of(double lanes[GC_SUM_LANES])
{
    double total = gc_lanes_total(lanes);
    return total == total ? total : (double)gc_float_of(GC_NAN_BITS);
}

static void update_from_tensors(const gc_segment *segment, const gc_target *target,
                                const gc_rule *rule, double *norms)
{
    gc_update_span span = span_of(target, rule, segment->start, segment->numel);
    double lanes[2 * GC_SUM_LANES] = {0};
    if (gc_adds_up(rule->kind))
        span.lanes = lanes;
    gc_current_kernels()->update(&span);
    if (span.lanes) {
        norms[0] = norm_of(lanes);
        norms[1] = norm_of(lanes + GC_SUM_LANES);
    }
}

/* Update the elements of one part, whose average stands in the stage of `job`. */
static double update_part(const gc_decode_job *job, const gc_segment *part, const gc_target *target,
                          const gc_rule *rule)
{
    double total = 0;
    for (uint32_t first = 0, numel; first < part->numel; first += numel) {
        uint32_t left = part->numel - first;
        numel = left < GC_UPDATE_NUMEL ? left : GC_UPDATE_NUMEL;
        gc_update_span span = span_of(target, rule, part->start + first, numel);
        span.gradient = (const char *)job->out + (size_t)first * (job->out_dtype == GC_F32 ? 4 : 2);
        span.gradient_dtype = job->out_dtype;
        double lanes[2 * GC_SUM_LANES];
        if (gc_adds_up(rule->kind))
            span.lanes = memset(lanes, 0, sizeof lanes);
        gc_current_kernels()->update(&span);
        if (span.lanes)
            total += norm_of(lanes);
    }
    return total;
}

/* `job` decodes into a stage of GC_STREAM_NUMEL elements. */
static void update_from_payloads(gc_decode_job *job, const form *form, const gc_segment *segment,
                                 const gc_target *target, const gc_rule *rule, double *norms)
{
    double total = 0;
    for (uint32_t first = 0, numel; first < segment->numel; first += numel) {
        uint32_t left = segment->numel - first;
        numel = left < GC_UPDATE_NUMEL ? left : GC_UPDATE_NUMEL;
        if (form->stream_nbytes)
            numel = gc_run_at(segment, first, segment->numel).numel;
        gc_segment part = part_of(segment, form, first, numel);
        form->decode(job, &part);
        total += update_part(job, &part, target, rule);
    }
    if (gc_adds_up(rule->kind)) {
        norms[0] = total;
        norms[1] = 0;
    }
}

gc_status gc_update(const gc_gradients *gradients, const gc_segment *segments, size_t segment_count,
                    const gc_target *targets, size_t target_count, const gc_rule *rules,
                    size_t rule_count, double *norms, uint32_t *nonfinite)
{
    if (!update_ok(gradients, segments, segment_count, targets, target_count, rules, rule_count,
                   norms, nonfinite))
        return GC_INVALID_ARGUMENT;
    float stage[GC_STREAM_NUMEL];
    gc_decode_job job = {.payloads = gradients->payloads,
                         .payload_count = gradients->payload_count,
                         .out = stage,
                         .out_dtype = gradients->dtype,
                         .shared = gradients->shared,
                         .value_dtype = gradients->value_dtype,
                         .code_bits = gradients->code_bits,
                         .stream_nbytes = gradients->stream_nbytes,
                         .lane_bits = gradients->lane_bits,
                         .world_size = (uint32_t)gradients->world_size};
    form form = form_of(gradients);
    unsigned saved = gc_enter_float_environment();
    for (size_t s = 0; s < segment_count; s++) {
        const gc_segment *segment = &segments[s];
        if (!segment->numel)
            continue;
        const gc_target *target = &targets[segment->parameter];
        if (target->rule == GC_NO_RULE)
            continue;
        const gc_rule *rule = &rules[target->rule];
        if (gradients->from == GC_FROM_TENSORS || !gc_reads_gradient(rule->kind))
            update_from_tensors(segment, target, rule, norms ? norms + 2 * s : NULL);
        else
            update_from_payloads(&job, &form, segment, target, rule, norms ? norms + 2 * s : NULL);
    }
    gc_leave_float_environment(saved);
    gc_report(nonfinite, job.nonfinite);
    return GC_OK;
}

/* ---- storage --------------------------------------------------------------------------------- */
gc_status gc_split(const uint32_t *w_bits, uint64_t numel, int rounding, uint16_t *top,
                   uint16_t *trail)
{
    if ((rounding != GC_TRUNCATE && rounding != GC_NEAREST) ||
        (numel && (!w_bits || !top || !trail)))
        return GC_INVALID_ARGUMENT;
    for (uint64_t i = 0; i < numel; i++) {
        uint32_t bits = w_bits[i];
        top[i] = gc_top_of(bits, (uint32_t)rounding);
        trail[i] = (uint16_t)bits;
    }
    return GC_OK;
}

gc_status gc_join(const uint16_t *top, const uint16_t *trail, uint64_t numel, int rounding,
                  uint32_t *w_bits)
{
    if ((rounding != GC_TRUNCATE && rounding != GC_NEAREST) ||
        (numel && (!w_bits || !top || !trail)))
        return GC_INVALID_ARGUMENT;
    for (uint64_t i = 0; i < numel; i++)
        w_bits[i] = gc_join_bits(top[i], trail[i], (uint32_t)rounding);
    return GC_OK;
}
