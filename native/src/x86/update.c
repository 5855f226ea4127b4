/* update.c - weight updates of sixteen elements at a time; what is left over goes to the portable
 * kernel.
 *
 * One body, made a loop of its own for every kind, storage of the weight and gradient dtype.
 * Divisions and roots are the processor's own, which round as the contract says.
 *
 * Sixteen elements are a pair of vectors. Those of fp32 weights lie in order. Those of split
 * weights are woven: interleaving tops and trails inside the two halves of a register joins them
 * with one instruction, and leaves elements 0-3 and 8-11 in the first vector, 4-7 and 12-15 in the
 * second; packing undoes it. Everything else is brought into that order.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "../update.h"
#include "common.h"

enum {
    STEP_NUMEL = 16,
    PREFETCH_NUMEL = 2048,
    STORED_F32 = 0,
    STORED_TRUNCATED = 1,
    STORED_NEAREST = 2
};

typedef struct {
    __m256 a, b;
} pair;

GC_AVX2_INLINE pair scaled(__m256 c, pair x)
{
    return (pair){_mm256_mul_ps(c, x.a), _mm256_mul_ps(c, x.b)};
}

/* fma(c, x, y) */
GC_AVX2_INLINE pair plus_scaled(__m256 c, pair x, pair y)
{
    return (pair){_mm256_fmadd_ps(c, x.a, y.a), _mm256_fmadd_ps(c, x.b, y.b)};
}

/* The numbers of a rule, in every lane. */
typedef struct {
    __m256 sign, step_size, weight_decay, decay, momentum, keep, keep2, beta2, bias1, bias2, eps,
        prescale;
    int decays, is_first, is_nesterov, keeps_little, is_prescaled;
} constants;

GC_AVX2_INLINE constants constants_of(const gc_rule *rule)
{
    int keeps_little = rule->keep < 0.5f;
    constants c = {
        .sign = _mm256_castsi256_ps(
            _mm256_set1_epi32(rule->flags & GC_MAXIMIZE ? (int)0x80000000u : 0)),
        .step_size = _mm256_set1_ps(rule->step_size),
        .weight_decay = _mm256_set1_ps(rule->weight_decay),
        .decay = _mm256_set1_ps(rule->decay),
        .momentum = _mm256_set1_ps(rule->momentum),
        .keep = _mm256_set1_ps(rule->kind == GC_SGD || keeps_little ? rule->keep
                                                                    : rule->keep - 1.0f),
        .keep2 = _mm256_set1_ps(rule->keep2),
        .beta2 = _mm256_set1_ps(rule->beta2),
        .bias1 = _mm256_set1_ps(rule->bias1),
        .bias2 = _mm256_set1_ps(rule->bias2),
        .eps = _mm256_set1_ps(rule->eps),
        .prescale = _mm256_set1_ps(rule->prescale),
        .decays = rule->kind == GC_ADAMW ? rule->decay != 1.0f : rule->weight_decay != 0,
        .is_first = (rule->flags & GC_FIRST) != 0,
        .is_nesterov = (rule->flags & GC_NESTEROV) != 0,
        .keeps_little = keeps_little,
        .is_prescaled = (rule->flags & GC_PRESCALE) != 0,
    };
    return c;
}

/* ---- NaNs ------------------------------------------------------------------------------------ */
/* NaNs are rare: one test a pair tells whether there is one, and only then they are replaced. */
GC_AVX2_INLINE __m256 quiet8(__m256 x)
{
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(GC_NAN_BITS)),
                            _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

GC_AVX2_INLINE pair quiet_pair(pair x)
{
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q)), 0))
        return (pair){quiet8(x.a), quiet8(x.b)};
    return x;
}

/* ---- memory: what `woven` says of the order in registers ------------------------------------- */
GC_AVX2_INLINE pair weave(pair x)
{
    return (pair){_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}

GC_AVX2_INLINE pair load_f32(const float *p, int woven)
{
    pair x = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    return woven ? weave(x) : x;
}

GC_AVX2_INLINE void store_f32(float *p, pair x, int woven)
{
    if (woven)
        x = weave(x);
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}

/* fp32 numbers whose upper halves are in `high`, lower ones in `low`; woven. */
GC_AVX2_INLINE pair interleave(__m256i low, __m256i high)
{
    return (pair){_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high)),
                  _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high))};
}

GC_AVX2_INLINE pair load_gradient_pair(const void *gradient, int dtype, uint32_t i, int woven)
{
    if (dtype == GC_F32)
        return load_f32((const float *)gradient + i, woven);
    if (!woven)
        return (pair){gc_load8(gradient, GC_BF16, i), gc_load8(gradient, GC_BF16, i + 8)};
    return interleave(_mm256_setzero_si256(),
                      _mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + i)));
}

/* NaNs may differ from gc_join_bits', but whatever is made of them is a quiet NaN. */
GC_AVX2_INLINE pair load_weight_pair(const gc_update_span *span, uint32_t i, int stored)
{
    if (stored == STORED_F32)
        return load_f32((const float *)span->weight + i, 0);
    __m256i top = _mm256_loadu_si256((const __m256i *)((const uint16_t *)span->weight + i));
    __m256i trail = _mm256_loadu_si256((const __m256i *)(span->trail + i));
    if (stored == STORED_NEAREST) /* hi = top - (lo >> 15) */
        top = _mm256_sub_epi16(top, _mm256_srli_epi16(trail, 15));
    return interleave(trail, top);
}

GC_AVX2_INLINE void store_weight_pair(const gc_update_span *span, uint32_t i, pair w, int stored)
{
    w = quiet_pair(w);
    if (stored == STORED_F32) {
        store_f32((float *)span->weight + i, w, 0);
        return;
    }
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    __m256i a = _mm256_castps_si256(w.a), b = _mm256_castps_si256(w.b);
    __m256i trail = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    __m256i top = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    if (stored == STORED_NEAREST) /* the quiet NaN's trail is 0: it stays what it is */
        top = _mm256_add_epi16(top, _mm256_srli_epi16(trail, 15));
    _mm256_storeu_si256((__m256i *)((uint16_t *)span->weight + i), top);
    _mm256_storeu_si256((__m256i *)(span->trail + i), trail);
}

/* ---- rules: the lines of gradcomp.h ---------------------------------------------------------- */
GC_AVX2_INLINE pair sgd_pair(const constants *c, float *s0, pair w, pair g, int has_momentum,
                             int woven)
{
    if (c->decays)
        g = plus_scaled(c->weight_decay, w, g);
    if (has_momentum) {
        pair b = g;
        if (!c->is_first)
            b = plus_scaled(c->keep, g, scaled(c->momentum, load_f32(s0, woven)));
        b = quiet_pair(b);
        store_f32(s0, b, woven);
        g = c->is_nesterov ? plus_scaled(c->momentum, b, g) : b;
    }
    return plus_scaled(c->step_size, g, w);
}

/* w + above / below */
GC_AVX2_INLINE pair plus_quotient(pair w, pair above, pair below)
{
    return (pair){_mm256_add_ps(w.a, _mm256_div_ps(above.a, below.a)),
                  _mm256_add_ps(w.b, _mm256_div_ps(above.b, below.b))};
}

GC_AVX2_INLINE pair root(pair x) { return (pair){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
GC_AVX2_INLINE pair plus(pair x, __m256 c)
{
    return (pair){_mm256_add_ps(x.a, c), _mm256_add_ps(x.b, c)};
}
GC_AVX2_INLINE pair over(pair x, __m256 c)
{
    return (pair){_mm256_div_ps(x.a, c), _mm256_div_ps(x.b, c)};
}

GC_AVX2_INLINE pair adagrad_pair(const constants *c, float *s0, pair w, pair g, int woven)
{
    if (c->decays)
        g = plus_scaled(c->weight_decay, w, g);
    pair sum = load_f32(s0, woven);
    sum = quiet_pair((pair){_mm256_fmadd_ps(g.a, g.a, sum.a), _mm256_fmadd_ps(g.b, g.b, sum.b)});
    store_f32(s0, sum, woven);
    return plus_quotient(w, scaled(c->step_size, g), plus(root(sum), c->eps));
}

typedef struct {
    pair first, second;
} moments;

GC_AVX2_INLINE moments load_moments(const float *s0, const float *s1, int woven)
{
    return (moments){load_f32(s0, woven), load_f32(s1, woven)};
}

GC_AVX2_INLINE moments moments_pair(const constants *c, float *s0, float *s1, pair g, int woven)
{
    moments old = load_moments(s0, s1, woven), new;
    pair change = {_mm256_sub_ps(g.a, old.first.a), _mm256_sub_ps(g.b, old.first.b)};
    new.first = quiet_pair(plus_scaled(c->keep, change, c->keeps_little ? old.first : g));
    pair kept = scaled(c->keep2, g), decayed = scaled(c->beta2, old.second);
    new.second = quiet_pair(
        (pair){_mm256_fmadd_ps(kept.a, g.a, decayed.a), _mm256_fmadd_ps(kept.b, g.b, decayed.b)});
    store_f32(s0, new.first, woven);
    store_f32(s1, new.second, woven);
    return new;
}

GC_AVX2_INLINE pair adamw_pair(const constants *c, float *s0, float *s1, pair w, pair g, int woven)
{
    if (c->decays)
        w = scaled(c->decay, w);
    moments m = moments_pair(c, s0, s1, g, woven);
    return plus_quotient(w, scaled(c->step_size, m.first),
                         plus(over(root(m.second), c->bias2), c->eps));
}

/* LAMB's u */
GC_AVX2_INLINE pair direction_pair(const constants *c, moments m, pair w)
{
    pair above = scaled(c->bias1, m.first), below = plus(root(m.second), c->eps);
    pair u = {_mm256_div_ps(above.a, below.a), _mm256_div_ps(above.b, below.b)};
    return c->decays ? plus_scaled(c->weight_decay, w, u) : u;
}

/* Add squares to the sums of lanes 4v + i in element i of vector v; the products are exact: one
 * rounding each. */
GC_AVX2_INLINE void add_squares(__m256d sums[4], pair x, int woven)
{
    __m128 quarters[4] = {_mm256_castps256_ps128(x.a), _mm256_extractf128_ps(x.a, 1),
                          _mm256_castps256_ps128(x.b), _mm256_extractf128_ps(x.b, 1)};
    for (int q = 0; q < 4; q++) {
        int v = woven ? (q == 1 ? 2 : q == 2 ? 1 : q) : q;
        __m256d d = _mm256_cvtps_pd(quarters[q]);
        sums[v] = _mm256_fmadd_pd(d, d, sums[v]);
    }
}

/* ---- the loop -------------------------------------------------------------------------------- */
/* Ask for what is read some iterations from now on: the processor does not find so many streams by
 * itself. */
GC_AVX2_INLINE void prefetch(const gc_update_span *span, uint64_t i, uint32_t kind, int states,
                             int stored, int dtype)
{
    if (gc_touches_weight(kind))
        gc_prefetch(span->weight, stored == STORED_F32 ? GC_F32 : GC_BF16, i);
    if (gc_touches_weight(kind) && stored != STORED_F32)
        gc_prefetch(span->trail, GC_BF16, i);
    if (gc_reads_gradient(kind))
        gc_prefetch(span->gradient, dtype, i);
    if (states)
        gc_prefetch(span->state0, GC_F32, i);
    if (states == 2)
        gc_prefetch(span->state1, GC_F32, i);
}

GC_AVX2_INLINE void update_body(const gc_update_span *span, uint32_t numel, uint32_t kind,
                                int states, int stored, int dtype)
{
    const int woven = stored != STORED_F32;
    constants c = constants_of(span->rule);
    __m256d first_sums[4], second_sums[4];
    for (int v = 0; v < 4; v++)
        first_sums[v] = second_sums[v] = _mm256_setzero_pd();
    for (uint32_t i = 0; i < numel; i += STEP_NUMEL) {
        float *s0 = states ? span->state0 + i : NULL, *s1 = states == 2 ? span->state1 + i : NULL;
        prefetch(span, (uint64_t)i + PREFETCH_NUMEL, kind, states, stored, dtype);
        pair w = {_mm256_setzero_ps(), _mm256_setzero_ps()}, g = w;
        if (gc_touches_weight(kind))
            w = load_weight_pair(span, i, stored);
        if (gc_reads_gradient(kind)) {
            g = load_gradient_pair(span->gradient, dtype, i, woven);
            g = (pair){_mm256_xor_ps(g.a, c.sign), _mm256_xor_ps(g.b, c.sign)};
            if (c.is_prescaled)
                g = scaled(c.prescale, g);
        }
        if (kind == GC_SGD) {
            w = sgd_pair(&c, s0, w, g, states, woven);
        } else if (kind == GC_ADAGRAD) {
            w = adagrad_pair(&c, s0, w, g, woven);
        } else if (kind == GC_ADAMW) {
            w = adamw_pair(&c, s0, s1, w, g, woven);
        } else if (kind == GC_SQUARES) {
            add_squares(first_sums, g, woven);
        } else {
            moments m = gc_reads_gradient(kind) ? moments_pair(&c, s0, s1, g, woven)
                                                : load_moments(s0, s1, woven);
            if (kind != GC_MOMENTS) {
                pair u = direction_pair(&c, m, w);
                if (kind == GC_LAMB_APPLY) {
                    w = plus_scaled(c.step_size, u, w);
                } else {
                    add_squares(first_sums, w, woven);
                    add_squares(second_sums, u, woven);
                }
            }
        }
        if (gc_writes_weight(kind))
            store_weight_pair(span, i, w, stored);
    }
    if (gc_adds_up(kind))
        for (int v = 0; v < 4; v++) {
            _mm256_storeu_pd(span->lanes + 4 * v, first_sums[v]);
            _mm256_storeu_pd(span->lanes + GC_SUM_LANES + 4 * v, second_sums[v]);
        }
}

#define BY_GRADIENT(kind, states, stored)                                                    \
    (span->gradient_dtype == GC_F32 ? update_body(span, numel, kind, states, stored, GC_F32) \
                                    : update_body(span, numel, kind, states, stored, GC_BF16))
#define BY_STORAGE(kind, states)                                                         \
    (!span->trail                          ? BY_GRADIENT(kind, states, STORED_F32)       \
     : span->rule->rounding == GC_TRUNCATE ? BY_GRADIENT(kind, states, STORED_TRUNCATED) \
                                           : BY_GRADIENT(kind, states, STORED_NEAREST))

GC_AVX2 void gc_update_avx2(const gc_update_span *span)
{
    uint32_t numel = span->numel / STEP_NUMEL * STEP_NUMEL;
    switch (span->rule->kind) {
    case GC_SGD:
        if (gc_uses_state0(span->rule))
            BY_STORAGE(GC_SGD, 1);
        else
            BY_STORAGE(GC_SGD, 0);
        break;
    case GC_ADAGRAD:
        BY_STORAGE(GC_ADAGRAD, 1);
        break;
    case GC_ADAMW:
        BY_STORAGE(GC_ADAMW, 2);
        break;
    case GC_MOMENTS:
        BY_GRADIENT(GC_MOMENTS, 2, STORED_F32);
        break;
    case GC_LAMB_START:
        BY_STORAGE(GC_LAMB_START, 2);
        break;
    case GC_LAMB_NORMS:
        BY_STORAGE(GC_LAMB_NORMS, 2);
        break;
    case GC_LAMB_APPLY:
        BY_STORAGE(GC_LAMB_APPLY, 2);
        break;
    default:
        BY_GRADIENT(GC_SQUARES, 0, STORED_F32);
        break;
    }
    if (numel == span->numel)
        return;
    gc_update_span rest = *span;
    size_t weight_size = span->trail ? 2 : 4,
           gradient_size = span->gradient_dtype == GC_F32 ? 4 : 2;
    rest.numel -= numel;
    /* a rule that does not read it has none */
    rest.weight = (void *)((uintptr_t)span->weight + numel * weight_size);
    rest.trail = span->trail ? span->trail + numel : NULL;
    rest.state0 = span->state0 ? span->state0 + numel : NULL;
    rest.state1 = span->state1 ? span->state1 + numel : NULL;
    rest.gradient = (const void *)((uintptr_t)span->gradient + numel * gradient_size);
    gc_update_portable(&rest);
}
#endif
