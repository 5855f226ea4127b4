/* update.c - weight updates, one element after the other: what gradcomp.h says of gc_rule, line by
 * line. */
#include <math.h>

#include "update.h"

GC_INLINE float quiet(float x) { return gc_is_nan(x) ? gc_float_of(GC_NAN_BITS) : x; }

GC_INLINE float load_weight(const gc_update_span *span, uint32_t i)
{
    if (!span->trail)
        return ((const float *)span->weight)[i];
    return gc_float_of(
        gc_join_bits(((const uint16_t *)span->weight)[i], span->trail[i], span->rule->rounding));
}

GC_INLINE void store_weight(const gc_update_span *span, uint32_t i, float w)
{
    w = quiet(w);
    if (!span->trail) {
        ((float *)span->weight)[i] = w;
        return;
    }
    uint32_t bits = gc_bits_of(w);
    ((uint16_t *)span->weight)[i] = gc_top_of(bits, span->rule->rounding);
    span->trail[i] = (uint16_t)bits;
}

GC_INLINE float load_gradient(const gc_update_span *span, uint32_t i)
{
    float g = gc_load(span->gradient, span->gradient_dtype, i);
    if (span->rule->flags & GC_MAXIMIZE)
        g = gc_float_of(gc_bits_of(g) ^ 0x80000000u);
    return span->rule->flags & GC_PRESCALE ? g * span->rule->prescale : g;
}

GC_INLINE void update_moments(const gc_update_span *span, uint32_t i, float g)
{
    const gc_rule *rule = span->rule;
    float *s0 = &span->state0[i], *s1 = &span->state1[i];
    float change = g - *s0;
    *s0 = quiet(rule->keep < 0.5f ? fmaf(rule->keep, change, *s0)
                                  : fmaf(rule->keep - 1.0f, change, g));
    float decayed = *s1 * rule->beta2;
    *s1 = quiet(fmaf(rule->keep2 * g, g, decayed));
}

/* LAMB's u. */
GC_INLINE float direction(const gc_update_span *span, uint32_t i, float w)
{
    const gc_rule *rule = span->rule;
    float u = (rule->bias1 * span->state0[i]) / (sqrtf(span->state1[i]) + rule->eps);
    return rule->weight_decay != 0 ? fmaf(rule->weight_decay, w, u) : u;
}

GC_INLINE void add_up(const gc_update_span *span, uint32_t i, float a, float b)
{
    uint32_t lane = i % GC_SUM_LANES;
    span->lanes[lane] += (double)a * a;
    span->lanes[GC_SUM_LANES + lane] += (double)b * b;
}

static void sgd(const gc_update_span *span, uint32_t i)
{
    const gc_rule *rule = span->rule;
    float w = load_weight(span, i), g = load_gradient(span, i);
    if (rule->weight_decay != 0)
        g = fmaf(rule->weight_decay, w, g);
    if (rule->momentum != 0) {
        float b = g;
        if (!(rule->flags & GC_FIRST)) {
            float decayed = rule->momentum * span->state0[i];
            b = fmaf(rule->keep, g, decayed);
        }
        span->state0[i] = quiet(b);
        g = rule->flags & GC_NESTEROV ? fmaf(rule->momentum, b, g) : b;
    }
    store_weight(span, i, fmaf(rule->step_size, g, w));
}

static void adagrad(const gc_update_span *span, uint32_t i)
{
    const gc_rule *rule = span->rule;
    float w = load_weight(span, i), g = load_gradient(span, i);
    if (rule->weight_decay != 0)
        g = fmaf(rule->weight_decay, w, g);
    float sum = fmaf(g, g, span->state0[i]);
    span->state0[i] = quiet(sum);
    store_weight(span, i, w + (rule->step_size * g) / (sqrtf(sum) + rule->eps));
}

static void adamw(const gc_update_span *span, uint32_t i)
{
    const gc_rule *rule = span->rule;
    float w = load_weight(span, i);
    if (rule->decay != 1.0f)
        w = w * rule->decay;
    update_moments(span, i, load_gradient(span, i));
    float below = sqrtf(span->state1[i]) / rule->bias2 + rule->eps;
    store_weight(span, i, w + (rule->step_size * span->state0[i]) / below);
}

void gc_update_portable(const gc_update_span *span)
{
    uint32_t kind = span->rule->kind;
    for (uint32_t i = 0; i < span->numel; i++) {
        if (kind == GC_SGD)
            sgd(span, i);
        else if (kind == GC_ADAGRAD)
            adagrad(span, i);
        else if (kind == GC_ADAMW)
            adamw(span, i);
        else if (kind == GC_SQUARES)
            add_up(span, i, load_gradient(span, i), 0.0f);
        else if (kind == GC_LAMB_APPLY) {
            float w = load_weight(span, i);
            store_weight(span, i, fmaf(span->rule->step_size, direction(span, i, w), w));
        } else {
            if (kind != GC_LAMB_NORMS)
                update_moments(span, i, load_gradient(span, i));
            if (kind != GC_MOMENTS) {
                float w = load_weight(span, i);
                add_up(span, i, w, direction(span, i, w));
            }
        }
    }
}
