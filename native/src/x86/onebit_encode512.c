/* onebit_encode512.c - 1-bit codes, class means and the new residual, sixteen elements at a time; a
 * mask is their bits and picks the sums that they enter. */
#include "internal.h"

#if defined(__x86_64__)
#include "common512.h"
#include "onebit_groups.h"

/* Bits of |g| seen and the largest |x|. */
typedef struct {
    __m512i any_gradient, absmax;
} watch;

/* Sixteen lanes of a block's two class sums. */
typedef struct {
    __m512d zeros[2], ones[2];
} class_lanes;

GC_AVX512_INLINE void add8(class_lanes *lanes, int j, __m256 x, __mmask8 is_one)
{
    /* leaving out the +0.0 of the other class changes no lane: none is ever -0.0 */
    __m512d d = _mm512_cvtps_pd(x);
    lanes->ones[j] = _mm512_mask_add_pd(lanes->ones[j], is_one, lanes->ones[j], d);
    lanes->zeros[j] = _mm512_mask_add_pd(lanes->zeros[j], (__mmask8)~is_one, lanes->zeros[j], d);
}

/* Take in sixteen elements: stage x and its bits, add x to the sums. */
GC_AVX512_INLINE void take16(watch *seen, class_lanes *lanes, gc_onebit_stage *stage, uint32_t i,
                             __m512 g, __m512 x)
{
    __mmask16 is_one = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    uint16_t bits = (uint16_t)is_one;
    _mm512_storeu_ps(stage->x + i, x);
    memcpy(stage->bits + i / 8, &bits, 2);
    seen->any_gradient = _mm512_or_si512(seen->any_gradient, gc_abs16(g));
    seen->absmax = _mm512_max_epu32(seen->absmax, gc_abs16(x));
    add8(lanes, 0, _mm512_castps512_ps256(x), (__mmask8)is_one);
    add8(lanes, 1, _mm512_extractf32x8_ps(x, 1), (__mmask8)(is_one >> 8));
}

/* Elements of the group from `at` on; those past `numel` are 0. */
GC_AVX512_INLINE void take_rest(watch *seen, class_lanes *lanes, gc_onebit_stage *stage,
                                const gc_onebit_view *view, uint32_t at, uint32_t i, uint32_t numel,
                                int dtype)
{
    float g[16] = {0}, r[16] = {0};
    for (uint32_t j = 0; j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + at + j);
        r[j] = view->residual ? view->residual[at + j] : 0;
    }
    __m512 x = _mm512_loadu_ps(g);
    take16(seen, lanes, stage, i, x, view->residual ? _mm512_add_ps(x, _mm512_loadu_ps(r)) : x);
}

GC_AVX512_INLINE void take_body(gc_onebit_totals *totals, gc_onebit_stage *stage,
                                const gc_onebit_view *view, uint32_t chunk, uint32_t numel,
                                int dtype)
{
    watch seen = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (uint32_t block = 0; block < numel; block += GC_BLOCK_NUMEL) {
        uint32_t end = numel - block < GC_BLOCK_NUMEL ? numel : block + GC_BLOCK_NUMEL, i = block;
        class_lanes lanes;
        for (int j = 0; j < 2; j++)
            lanes.zeros[j] = lanes.ones[j] = _mm512_setzero_pd();
        for (; i + 16 <= end; i += 16) {
            __m512 g;
            __m512 x = gc_take16(view->src, dtype, view->data, view->residual, chunk + i, &g);
            take16(&seen, &lanes, stage, i, g, x);
        }
        if (i < end)
            take_rest(&seen, &lanes, stage, view, chunk + i, i, end - i, dtype);
        totals->sums[0] += gc_total16_avx512(lanes.zeros);
        totals->sums[1] += gc_total16_avx512(lanes.ones);
    }
    uint32_t absmax = _mm512_reduce_max_epu32(seen.absmax);
    totals->absmax_bits = absmax > totals->absmax_bits ? absmax : totals->absmax_bits;
    totals->any_gradient |= _mm512_test_epi32_mask(seen.any_gradient, seen.any_gradient);
    totals->ones += gc_finish_bits(stage, numel);
}

GC_AVX512 static void take(gc_onebit_totals *totals, gc_onebit_stage *stage,
                           const gc_onebit_view *view, uint32_t chunk, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, stage, view, chunk, numel, GC_F32),
                take_body(totals, stage, view, chunk, numel, GC_BF16),
                take_body(totals, stage, view, chunk, numel, GC_F16));
}

typedef struct {
    __m512 mean0, mean1, decay;
    __m512 all; /* sums of |x - q| */
} leaving;

GC_AVX512_INLINE leaving start_leaving(const gc_onebit_view *view)
{
    return (leaving){_mm512_set1_ps(view->means[0]), _mm512_set1_ps(view->means[1]),
                     _mm512_set1_ps(view->decay), _mm512_setzero_ps()};
}

/* r' = decay * (x - q) for sixteen elements, of which those in `counted` are there. */
GC_AVX512_INLINE __m512 left16(__m512 x, leaving *to, __mmask16 counted)
{
    __mmask16 is_one = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    __m512 left = _mm512_sub_ps(x, _mm512_mask_blend_ps(is_one, to->mean0, to->mean1));
    to->all = _mm512_mask_add_ps(to->all, counted, to->all, _mm512_abs_ps(left));
    return _mm512_mul_ps(left, to->decay);
}

GC_AVX512_INLINE __mmask16 first_lanes(uint32_t count) { return (__mmask16)((1u << count) - 1); }

GC_AVX512 static double leave_staged(const gc_onebit_stage *stage, const gc_onebit_view *view,
                                     uint32_t numel, float *out, int streams)
{
    leaving to = start_leaving(view);
    uint32_t i = 0;
    if (streams && (uintptr_t)out % 64 == 0)
        for (; i + 16 <= numel; i += 16)
            _mm512_stream_ps(out + i, left16(_mm512_loadu_ps(stage->x + i), &to, 0xFFFF));
    for (; i + 16 <= numel; i += 16)
        _mm512_storeu_ps(out + i, left16(_mm512_loadu_ps(stage->x + i), &to, 0xFFFF));
    if (i < numel) {
        __mmask16 rest = first_lanes(numel - i);
        _mm512_mask_storeu_ps(out + i, rest, left16(_mm512_loadu_ps(stage->x + i), &to, rest));
    }
    return _mm512_reduce_add_ps(to.all);
}

GC_AVX512_INLINE double leave_body(const gc_onebit_view *view, uint32_t numel, float *out,
                                   int dtype)
{
    leaving to = start_leaving(view);
    uint32_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        __m512 x = gc_load16(view->src, dtype, view->data + i);
        if (view->residual)
            x = _mm512_add_ps(x, _mm512_loadu_ps(view->residual + i));
        _mm512_storeu_ps(out + i, left16(x, &to, 0xFFFF));
    }
    double all = _mm512_reduce_add_ps(to.all);
    for (; i < numel; i++) {
        float g = gc_load(view->src, dtype, view->data + i),
              x = view->residual ? g + view->residual[i] : g;
        float left = x - view->means[x > 0];
        all += left < 0 ? -left : left;
        out[i] = view->decay * left;
    }
    return all;
}

GC_AVX512 static double leave_again(const gc_onebit_view *view, uint32_t numel, float *out)
{
    GC_BY_DTYPE(view->dtype, return leave_body(view, numel, out, GC_F32),
                return leave_body(view, numel, out, GC_BF16),
                return leave_body(view, numel, out, GC_F16));
}

void gc_onebit_encode_avx512(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_onebit_tier tier = {take, leave_staged, leave_again};
    gc_encode_onebit_groups(job, segment, &tier);
}
#endif
