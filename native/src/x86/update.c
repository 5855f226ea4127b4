/* update.c - weight updates of sixteen elements at a time; what is left over goes to the portable kernel.
 *
 * One body, made a loop of its own for every kind, storage of the weight and gradient dtype. Divisions and roots are the
 * processor's own, which round as the contract says.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "../update.h"
#include "common.h"

enum { STEP_NUMEL = 16, STORED_F32 = 0, STORED_TRUNCATED = 1, STORED_NEAREST = 2 };

/* The numbers of a rule, in every lane. */
typedef struct {
    __m256i sign;
    __m256 step_size, weight_decay, decay, momentum, keep, keep2, beta2, bias1, bias2, eps, prescale;
    int decays, has_momentum, is_first, is_nesterov, keeps_little, is_prescaled;
} constants;

GC_AVX2_INLINE constants constants_of(const gc_rule *rule)
{
    int keeps_little = rule->keep < 0.5f;
    constants c = {
        .sign = _mm256_set1_epi32(rule->flags & GC_MAXIMIZE ? (int)0x80000000u : 0),
        .step_size = _mm256_set1_ps(rule->step_size),
        .weight_decay = _mm256_set1_ps(rule->weight_decay),
        .decay = _mm256_set1_ps(rule->decay),
        .momentum = _mm256_set1_ps(rule->momentum),
        .keep = _mm256_set1_ps(rule->kind == GC_SGD || keeps_little ? rule->keep : rule->keep - 1.0f),
        .keep2 = _mm256_set1_ps(rule->keep2),
        .beta2 = _mm256_set1_ps(rule->beta2),
        .bias1 = _mm256_set1_ps(rule->bias1),
        .bias2 = _mm256_set1_ps(rule->bias2),
        .eps = _mm256_set1_ps(rule->eps),
        .prescale = _mm256_set1_ps(rule->prescale),
        .decays = rule->kind == GC_ADAMW ? rule->decay != 1.0f : rule->weight_decay != 0,
        .has_momentum = rule->momentum != 0,
        .is_first = (rule->flags & GC_FIRST) != 0,
        .is_nesterov = (rule->flags & GC_NESTEROV) != 0,
        .keeps_little = keeps_little,
        .is_prescaled = (rule->flags & GC_PRESCALE) != 0,
    };
    return c;
}

GC_AVX2_INLINE __m256 quiet(__m256 x)
{
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(GC_NAN_BITS)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* ---- weights: eight of them; NaNs may differ from gc_join_bits', and whatever is made of them is a quiet NaN ------- */
GC_AVX2_INLINE __m256 load_weight(const gc_update_span *span, uint32_t i, int stored)
{
    if (stored == STORED_F32)
        return _mm256_loadu_ps((const float *)span->weight + i);
    const __m128i *top = (const __m128i *)((const uint16_t *)span->weight + i);
    __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(top)), 16);
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(span->trail + i)));
    __m256i bits = _mm256_or_si256(high, low);
    if (stored == STORED_NEAREST)
        bits = _mm256_sub_epi32(bits, _mm256_slli_epi32(_mm256_srli_epi32(low, 15), 16));
    return _mm256_castsi256_ps(bits);
}

GC_AVX2_INLINE void store_weights(const gc_update_span *span, uint32_t i, __m256 a, __m256 b, int stored)
{
    a = quiet(a), b = quiet(b);
    if (stored == STORED_F32) {
        _mm256_storeu_ps((float *)span->weight + i, a);
        _mm256_storeu_ps((float *)span->weight + i + 8, b);
        return;
    }
    const __m256i half = _mm256_set1_epi32(0x8000), low = _mm256_set1_epi32(0xFFFF);
    __m256i abits = _mm256_castps_si256(a), bbits = _mm256_castps_si256(b);
    __m256i trail = _mm256_packus_epi32(_mm256_and_si256(abits, low), _mm256_and_si256(bbits, low));
    if (stored == STORED_NEAREST)
        abits = _mm256_add_epi32(abits, half), bbits = _mm256_add_epi32(bbits, half);
    __m256i top = _mm256_packus_epi32(_mm256_srli_epi32(abits, 16), _mm256_srli_epi32(bbits, 16));
    _mm256_storeu_si256((__m256i *)((uint16_t *)span->weight + i), _mm256_permute4x64_epi64(top, 0xD8));
    _mm256_storeu_si256((__m256i *)(span->trail + i), _mm256_permute4x64_epi64(trail, 0xD8));
}

/* ---- rules: the lines of gradcomp.h ------------------------------------------------------------------------------ */
GC_AVX2_INLINE __m256 sgd(const constants *c, float *s0, __m256 w, __m256 g)
{
    if (c->decays)
        g = _mm256_fmadd_ps(c->weight_decay, w, g);
    if (c->has_momentum) {
        __m256 b = g;
        if (!c->is_first)
            b = _mm256_fmadd_ps(c->keep, g, _mm256_mul_ps(c->momentum, _mm256_loadu_ps(s0)));
        _mm256_storeu_ps(s0, quiet(b));
        g = c->is_nesterov ? _mm256_fmadd_ps(c->momentum, b, g) : b;
    }
    return _mm256_fmadd_ps(c->step_size, g, w);
}

GC_AVX2_INLINE __m256 adagrad(const constants *c, float *s0, __m256 w, __m256 g)
{
    if (c->decays)
        g = _mm256_fmadd_ps(c->weight_decay, w, g);
    __m256 sum = _mm256_fmadd_ps(g, g, _mm256_loadu_ps(s0));
    _mm256_storeu_ps(s0, quiet(sum));
    return _mm256_add_ps(w, _mm256_div_ps(_mm256_mul_ps(c->step_size, g), _mm256_add_ps(_mm256_sqrt_ps(sum), c->eps)));
}

typedef struct {
    __m256 first, second;
} moments;

GC_AVX2_INLINE moments load_moments(const float *s0, const float *s1)
{
    return (moments){_mm256_loadu_ps(s0), _mm256_loadu_ps(s1)};
}

GC_AVX2_INLINE moments update_moments(const constants *c, float *s0, float *s1, __m256 g)
{
    moments old = load_moments(s0, s1), new;
    if (c->is_prescaled)
        g = _mm256_mul_ps(g, c->prescale);
    __m256 change = _mm256_sub_ps(g, old.first);
    new.first = quiet(_mm256_fmadd_ps(c->keep, change, c->keeps_little ? old.first : g));
    new.second = quiet(_mm256_fmadd_ps(_mm256_mul_ps(c->keep2, g), g, _mm256_mul_ps(old.second, c->beta2)));
    _mm256_storeu_ps(s0, new.first);
    _mm256_storeu_ps(s1, new.second);
    return new;
}

GC_AVX2_INLINE __m256 direction(const constants *c, moments m, __m256 w)
{
    __m256 below = _mm256_add_ps(_mm256_sqrt_ps(m.second), c->eps);
    __m256 u = _mm256_div_ps(_mm256_mul_ps(c->bias1, m.first), below);
    return c->decays ? _mm256_fmadd_ps(c->weight_decay, w, u) : u;
}

GC_AVX2_INLINE void add_squares(__m256d sums[2], __m256 x)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums[0] = _mm256_fmadd_pd(low, low, sums[0]); /* the product is exact: one rounding, as in the contract */
    sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
}

/* ---- the loop ---------------------------------------------------------------------------------------------------- */
GC_AVX2_INLINE void update_body(const gc_update_span *span, uint32_t numel, uint32_t kind, int stored, int dtype)
{
    constants c = constants_of(span->rule);
    __m256d weights[4], directions[4];
    for (int v = 0; v < 4; v++)
        weights[v] = directions[v] = _mm256_setzero_pd();
    for (uint32_t i = 0; i < numel; i += STEP_NUMEL) {
        __m256 w[2], g[2];
        for (int h = 0; h < 2; h++) {
            uint32_t at = i + 8 * (uint32_t)h;
            float *s0 = span->state0 ? span->state0 + at : NULL, *s1 = span->state1 ? span->state1 + at : NULL;
            if (gc_touches_weight(kind))
                w[h] = load_weight(span, at, stored);
            if (gc_reads_gradient(kind))
                g[h] = _mm256_xor_ps(gc_load8(span->gradient, dtype, at), _mm256_castsi256_ps(c.sign));
            if (kind == GC_SGD) {
                w[h] = sgd(&c, s0, w[h], g[h]);
            } else if (kind == GC_ADAGRAD) {
                w[h] = adagrad(&c, s0, w[h], g[h]);
            } else if (kind == GC_ADAMW) {
                if (c.decays)
                    w[h] = _mm256_mul_ps(w[h], c.decay);
                moments m = update_moments(&c, s0, s1, g[h]);
                __m256 below = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(m.second), c.bias2), c.eps);
                w[h] = _mm256_add_ps(w[h], _mm256_div_ps(_mm256_mul_ps(c.step_size, m.first), below));
            } else if (kind == GC_SQUARES) {
                add_squares(weights + 2 * h, g[h]);
            } else {
                moments m = gc_reads_gradient(kind) ? update_moments(&c, s0, s1, g[h]) : load_moments(s0, s1);
                if (kind == GC_MOMENTS)
                    continue;
                __m256 u = direction(&c, m, w[h]);
                if (kind == GC_LAMB_APPLY) {
                    w[h] = _mm256_fmadd_ps(c.step_size, u, w[h]);
                } else {
                    add_squares(weights + 2 * h, w[h]);
                    add_squares(directions + 2 * h, u);
                }
            }
        }
        if (gc_writes_weight(kind))
            store_weights(span, i, w[0], w[1], stored);
    }
    if (gc_adds_up(kind))
        for (int v = 0; v < 4; v++) {
            _mm256_storeu_pd(span->lanes + 4 * v, weights[v]);
            _mm256_storeu_pd(span->lanes + GC_SUM_LANES + 4 * v, directions[v]);
        }
}

#define BY_GRADIENT(kind, stored)                                                           \
    (span->gradient_dtype == GC_F32 ? update_body(span, numel, kind, stored, GC_F32)        \
                                    : update_body(span, numel, kind, stored, GC_BF16))
#define BY_STORAGE(kind)                                       \
    (!span->trail                                 ? BY_GRADIENT(kind, STORED_F32)       \
     : span->rule->rounding == GC_TRUNCATE        ? BY_GRADIENT(kind, STORED_TRUNCATED) \
                                                  : BY_GRADIENT(kind, STORED_NEAREST))

GC_AVX2 void gc_update_avx2(const gc_update_span *span)
{
    uint32_t numel = span->numel / STEP_NUMEL * STEP_NUMEL;
    switch (span->rule->kind) {
    case GC_SGD: BY_STORAGE(GC_SGD); break;
    case GC_ADAGRAD: BY_STORAGE(GC_ADAGRAD); break;
    case GC_ADAMW: BY_STORAGE(GC_ADAMW); break;
    case GC_MOMENTS: BY_GRADIENT(GC_MOMENTS, STORED_F32); break;
    case GC_LAMB_START: BY_STORAGE(GC_LAMB_START); break;
    case GC_LAMB_NORMS: BY_STORAGE(GC_LAMB_NORMS); break;
    case GC_LAMB_APPLY: BY_STORAGE(GC_LAMB_APPLY); break;
    default: BY_GRADIENT(GC_SQUARES, STORED_F32); break;
    }
    if (numel == span->numel)
        return;
    gc_update_span rest = *span;
    size_t weight_size = span->trail ? 2 : 4, gradient_size = span->gradient_dtype == GC_F32 ? 4 : 2;
    rest.numel -= numel;
    rest.weight = (char *)span->weight + numel * weight_size;
    rest.trail = span->trail ? span->trail + numel : NULL;
    rest.state0 = span->state0 ? span->state0 + numel : NULL;
    rest.state1 = span->state1 ? span->state1 + numel : NULL;
    rest.gradient = (const char *)span->gradient + numel * gradient_size;
    gc_update_portable(&rest);
}
#endif
