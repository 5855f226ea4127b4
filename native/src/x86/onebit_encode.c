/* onebit_encode.c - 1-bit codes, class means and the new residual; onebit_groups.c walks the
 * groups. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "onebit_groups.h"

enum { VECTORS_NUMEL = 16, PREFETCH_NUMEL = 1024 };

/* Bits of |g| seen and the largest |x|. */
typedef struct {
    __m256i any_gradient, absmax;
} watch;

/* Sixteen lanes of a block's two class sums. */
typedef struct {
    __m256d zeros[4], ones[4];
} class_lanes;

GC_AVX2_INLINE void add8(class_lanes *lanes, int j, __m256 x)
{
    const __m256d zero = _mm256_setzero_pd();
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)),
            high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    /* Of two zeros min and max return the second: +0.0, as the contract wants. */
    lanes->ones[j] = _mm256_add_pd(lanes->ones[j], _mm256_max_pd(low, zero));
    lanes->zeros[j] = _mm256_add_pd(lanes->zeros[j], _mm256_min_pd(low, zero));
    lanes->ones[j + 1] = _mm256_add_pd(lanes->ones[j + 1], _mm256_max_pd(high, zero));
    lanes->zeros[j + 1] = _mm256_add_pd(lanes->zeros[j + 1], _mm256_min_pd(high, zero));
}

/* Bits of eight elements. */
GC_AVX2_INLINE uint8_t bits8(__m256 x)
{
    return (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
}

/* Take in sixteen elements: stage x and its bits, add x to the sums. */
GC_AVX2_INLINE void take16(watch *seen, class_lanes *lanes, gc_onebit_stage *stage, uint32_t i,
                           __m256 g0, __m256 g1, __m256 x0, __m256 x1)
{
    _mm256_storeu_ps(stage->x + i, x0);
    _mm256_storeu_ps(stage->x + i + 8, x1);
    stage->bits[i / 8] = bits8(x0);
    stage->bits[i / 8 + 1] = bits8(x1);
    seen->any_gradient = _mm256_or_si256(seen->any_gradient,
                                         _mm256_or_si256(gc_abs8(g0), gc_abs8(g1)));
    seen->absmax = _mm256_max_epi32(seen->absmax, _mm256_max_epi32(gc_abs8(x0), gc_abs8(x1)));
    add8(lanes, 0, x0);
    add8(lanes, 2, x1);
}

GC_AVX2_INLINE void take_rest(watch *seen, class_lanes *lanes, gc_onebit_stage *stage,
                              const gc_onebit_view *view, uint32_t chunk, uint32_t i,
                              uint32_t numel, int dtype)
{
    float g[VECTORS_NUMEL] = {0}, r[VECTORS_NUMEL] = {0};
    for (uint32_t j = 0; i + j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + chunk + i + j);
        r[j] = view->residual ? view->residual[chunk + i + j] : 0;
    }
    __m256 g0 = _mm256_loadu_ps(g), g1 = _mm256_loadu_ps(g + 8), x0 = g0, x1 = g1;
    if (view->residual) {
        x0 = _mm256_add_ps(g0, _mm256_loadu_ps(r));
        x1 = _mm256_add_ps(g1, _mm256_loadu_ps(r + 8));
    }
    take16(seen, lanes, stage, i, g0, g1, x0, x1);
}

GC_AVX2_INLINE void take_body(gc_onebit_totals *totals, gc_onebit_stage *stage,
                              const gc_onebit_view *view, uint32_t chunk, uint32_t numel, int dtype)
{
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (uint32_t block = 0; block < numel; block += GC_BLOCK_NUMEL) {
        uint32_t end = numel - block < GC_BLOCK_NUMEL ? numel : block + GC_BLOCK_NUMEL, i = block;
        class_lanes lanes;
        for (int j = 0; j < 4; j++)
            lanes.zeros[j] = lanes.ones[j] = _mm256_setzero_pd();
        for (; i + VECTORS_NUMEL <= end; i += VECTORS_NUMEL) {
            uint64_t at = view->data + chunk + i;
            __m256 g0 = gc_load8(view->src, dtype, at), g1 = gc_load8(view->src, dtype, at + 8),
                   x0 = g0, x1 = g1;
            gc_prefetch(view->src, dtype, at + PREFETCH_NUMEL);
            if (view->residual) {
                gc_prefetch(view->residual, GC_F32, chunk + i + PREFETCH_NUMEL);
                x0 = _mm256_add_ps(g0, _mm256_loadu_ps(view->residual + chunk + i));
                x1 = _mm256_add_ps(g1, _mm256_loadu_ps(view->residual + chunk + i + 8));
            }
            take16(&seen, &lanes, stage, i, g0, g1, x0, x1);
        }
        if (i < end)
            take_rest(&seen, &lanes, stage, view, chunk, i, end, dtype);
        totals->sums[0] += gc_total16(lanes.zeros);
        totals->sums[1] += gc_total16(lanes.ones);
    }
    uint32_t absmax = gc_max8(seen.absmax);
    totals->absmax_bits = absmax > totals->absmax_bits ? absmax : totals->absmax_bits;
    totals->any_gradient |= gc_max8(seen.any_gradient);
    totals->ones += gc_finish_bits(stage, numel);
}

GC_AVX2 static void take(gc_onebit_totals *totals, gc_onebit_stage *stage,
                         const gc_onebit_view *view, uint32_t chunk, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, stage, view, chunk, numel, GC_F32),
                take_body(totals, stage, view, chunk, numel, GC_BF16),
                take_body(totals, stage, view, chunk, numel, GC_F16));
}

typedef struct {
    __m256 mean0, mean1, decay;
    __m256 all; /* sums of |x - q| */
} leaving;

GC_AVX2_INLINE leaving start_leaving(const gc_onebit_view *view)
{
    return (leaving){_mm256_set1_ps(view->means[0]), _mm256_set1_ps(view->means[1]),
                     _mm256_set1_ps(view->decay), _mm256_setzero_ps()};
}

/* r' = decay * (x - q) for eight elements. */
GC_AVX2_INLINE __m256 left8(__m256 x, leaving *to)
{
    __m256 is_one = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
    __m256 left = _mm256_sub_ps(x, _mm256_blendv_ps(to->mean0, to->mean1, is_one));
    to->all = _mm256_add_ps(to->all, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), left));
    return _mm256_mul_ps(left, to->decay);
}

/* One element of a tail; its magnitude is added to `all`. */
GC_AVX2_INLINE float left1(float x, const gc_onebit_view *view, double *all)
{
    float left = x - view->means[x > 0];
    *all += left < 0 ? -left : left;
    return view->decay * left;
}

GC_AVX2 static double leave_staged(const gc_onebit_stage *stage, const gc_onebit_view *view,
                                   uint32_t numel, float *out, int streams)
{
    leaving to = start_leaving(view);
    uint32_t i = 0;
    if (streams && (uintptr_t)out % 32 == 0)
        for (; i + 8 <= numel; i += 8)
            _mm256_stream_ps(out + i, left8(_mm256_loadu_ps(stage->x + i), &to));
    for (; i + 8 <= numel; i += 8)
        _mm256_storeu_ps(out + i, left8(_mm256_loadu_ps(stage->x + i), &to));
    double all = gc_sum8(to.all);
    for (; i < numel; i++)
        out[i] = left1(stage->x[i], view, &all);
    return all;
}

GC_AVX2_INLINE double leave_body(const gc_onebit_view *view, uint32_t numel, float *out, int dtype)
{
    leaving to = start_leaving(view);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        __m256 x = gc_load8(view->src, dtype, view->data + i);
        if (view->residual)
            x = _mm256_add_ps(x, _mm256_loadu_ps(view->residual + i));
        _mm256_storeu_ps(out + i, left8(x, &to));
    }
    double all = gc_sum8(to.all);
    for (; i < numel; i++) {
        float g = gc_load(view->src, dtype, view->data + i),
              x = view->residual ? g + view->residual[i] : g;
        out[i] = left1(x, view, &all);
    }
    return all;
}

GC_AVX2 static double leave_again(const gc_onebit_view *view, uint32_t numel, float *out)
{
    GC_BY_DTYPE(view->dtype, return leave_body(view, numel, out, GC_F32),
                return leave_body(view, numel, out, GC_BF16),
                return leave_body(view, numel, out, GC_F16));
}

void gc_onebit_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_onebit_tier tier = {take, leave_staged, leave_again};
    gc_encode_onebit_groups(job, segment, &tier);
}
#endif
