/* block_encode512.c - block_encode.c for codes of 2 bits, sixteen elements at a time: masks say
 * which are above and below the middle. Other widths wait for memory on avx2, too. */
#include "internal.h"

#if defined(__x86_64__)
#include "blocks.h"
#include "common512.h"

/* Bits of |g| seen, and sixteen lanes of a block's sum of squares. */
typedef struct {
    __m512i any_gradient;
    __m512d lanes[2];
} watch;

GC_AVX512_INLINE void take16(watch *seen, float *stage, __m512 g, __m512 x)
{
    _mm512_storeu_ps(stage, x);
    seen->any_gradient = _mm512_or_si512(seen->any_gradient, gc_abs16(g));
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)),
            high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    /* squares of fp32 are exact in float64, so that one rounding is as good as two */
    seen->lanes[0] = _mm512_fmadd_pd(low, low, seen->lanes[0]);
    seen->lanes[1] = _mm512_fmadd_pd(high, high, seen->lanes[1]);
}

/* The elements of the group from `at` on; those past `numel` are 0. */
GC_AVX512_INLINE void take_rest(watch *seen, float *stage, const gc_block_view *view, uint32_t at,
                                uint32_t numel, int dtype)
{
    float g[16] = {0}, r[16] = {0};
    for (uint32_t j = 0; j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + at + j);
        r[j] = view->residual ? view->residual[at + j] : 0;
    }
    __m512 x = _mm512_loadu_ps(g);
    take16(seen, stage, x, view->residual ? _mm512_add_ps(x, _mm512_loadu_ps(r)) : x);
}

GC_AVX512_INLINE void take_body(gc_block_totals *totals, float *x, const gc_block_view *view,
                                uint32_t first, uint32_t numel, int dtype)
{
    watch seen = {_mm512_setzero_si512(), {_mm512_setzero_pd(), _mm512_setzero_pd()}};
    uint32_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        __m512 g, sum = gc_take16(view->src, dtype, view->data, view->residual, first + i, &g);
        take16(&seen, x + i, g, sum);
    }
    if (i < numel)
        take_rest(&seen, x + i, view, first + i, numel - i, dtype);
    gc_add_squares(totals, gc_total16_avx512(seen.lanes));
    totals->any_gradient |= _mm512_test_epi32_mask(seen.any_gradient, seen.any_gradient);
}

GC_AVX512 void gc_take_squares_avx512(gc_block_totals *totals, float *x, const gc_block_view *view,
                                      uint32_t first, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, x, view, first, numel, GC_F32),
                take_body(totals, x, view, first, numel, GC_BF16),
                take_body(totals, x, view, first, numel, GC_F16));
}

/* ---- codes ----------------------------------------------------------------------------------- */
typedef struct {
    __m512 scale, inverse, half, decay;
    __m512 all; /* sums of |x - q| */
    int ternary;
} emitter;

/* Codes of 2 bits of sixteen elements; what they leave of `counted`, decayed, goes to `left`. */
GC_AVX512_INLINE uint32_t emit16(__m512 x, emitter *with, __mmask16 counted, __m512 *left)
{
    __mmask16 high, low;
    __m512 rest;
    if (with->ternary) {
        __m512 minus_half = _mm512_xor_ps(with->half, _mm512_set1_ps(-0.0f));
        __mmask16 below = _mm512_cmp_ps_mask(x, minus_half, _CMP_LT_OQ);
        high = _mm512_cmp_ps_mask(x, with->half, _CMP_GT_OQ);
        low = (__mmask16) ~(high | below);
        rest = _mm512_mask_sub_ps(x, high, x, with->scale);
        rest = _mm512_mask_add_ps(rest, below, x, with->scale);
    } else {
        const __m512 zero = _mm512_set1_ps(1.5f), magic = _mm512_set1_ps(GC_ROUNDING_MAGIC);
        __m512 t = _mm512_add_ps(_mm512_mul_ps(x, with->inverse), zero);
        t = _mm512_min_ps(_mm512_max_ps(t, _mm512_setzero_ps()), _mm512_set1_ps(3.0f));
        t = _mm512_add_ps(t, magic);
        __m512 code = _mm512_sub_ps(t, magic); /* exact */
        rest = _mm512_sub_ps(x, _mm512_mul_ps(_mm512_sub_ps(code, zero), with->scale));
        high = _mm512_test_epi32_mask(_mm512_castps_si512(t), _mm512_set1_epi32(2));
        low = _mm512_test_epi32_mask(_mm512_castps_si512(t), _mm512_set1_epi32(1));
    }
    with->all = _mm512_mask_add_ps(with->all, counted, with->all, _mm512_abs_ps(rest));
    *left = _mm512_mul_ps(rest, with->decay);
    return _pdep_u32(low, 0x55555555u) | _pdep_u32(high, 0xAAAAAAAAu);
}

GC_AVX512_INLINE double emit_body(const float *x, uint8_t *codes, emitter with, uint32_t numel,
                                  float *out, int streams)
{
    uint32_t i = 0, sixteen;
    __m512 left;
    for (; i + 16 <= numel; i += 16) {
        sixteen = emit16(_mm512_loadu_ps(x + i), &with, 0xFFFF, &left);
        memcpy(codes + i / 4, &sixteen, 4);
        if (streams)
            _mm512_stream_ps(out + i, left);
        else if (out)
            _mm512_storeu_ps(out + i, left);
    }
    if (i < numel) {
        __mmask16 rest = (__mmask16)((1u << (numel - i)) - 1);
        sixteen = emit16(_mm512_loadu_ps(x + i), &with, rest, &left);
        memcpy(codes + i / 4, &sixteen, 4);
        if (out)
            _mm512_mask_storeu_ps(out + i, rest, left);
    }
    return _mm512_reduce_add_ps(with.all);
}

GC_AVX512_INLINE double emit_levels(const gc_block_staged *staged, uint32_t numel, int ternary)
{
    const gc_block_levels *levels = &staged->levels;
    float *out = staged->out;
    emitter with = {_mm512_set1_ps(levels->scale), _mm512_set1_ps(levels->inverse),
                    _mm512_set1_ps(levels->half),  _mm512_set1_ps(staged->decay),
                    _mm512_setzero_ps(),           ternary};
    if (!out)
        return emit_body(staged->x, staged->codes, with, numel, NULL, 0);
    if (staged->streams && (uintptr_t)out % 64 == 0)
        return emit_body(staged->x, staged->codes, with, numel, out, 1);
    return emit_body(staged->x, staged->codes, with, numel, out, 0);
}

GC_AVX512 static double emit(const gc_block_staged *staged, uint32_t numel)
{
    return staged->levels.ternary ? emit_levels(staged, numel, 1) : emit_levels(staged, numel, 0);
}

void gc_block_encode_avx512(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_block_tier tier = {gc_take_squares_avx512, emit, NULL};
    if (job->code_bits == 2)
        gc_encode_blocks(job, segment, &tier);
    else
        gc_block_encode_avx2(job, segment);
}
#endif
