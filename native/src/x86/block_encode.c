/* block_encode.c - evenly spaced levels with error feedback, ternary ones too; blocks.c walks the
 * groups. */
#include "internal.h"

#if defined(__x86_64__)
#include "blocks.h"
#include "common.h"

enum { VECTORS_NUMEL = 16, PREFETCH_NUMEL = 1024 };

/* Bits of |g| seen, the largest |x|, and sixteen lanes of a block's sum of squares. */
typedef struct {
    __m256i any_gradient, absmax;
    __m256d lanes[4];
} watch;

GC_AVX2_INLINE void add_squares(watch *seen, int j, __m256 x)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)),
            high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    /* squares of fp32 are exact in float64, so that one rounding is as good as two */
    seen->lanes[j] = _mm256_fmadd_pd(low, low, seen->lanes[j]);
    seen->lanes[j + 1] = _mm256_fmadd_pd(high, high, seen->lanes[j + 1]);
}

GC_AVX2_INLINE void take16(watch *seen, float *stage, __m256 g0, __m256 g1, __m256 x0, __m256 x1,
                           int squares)
{
    _mm256_storeu_ps(stage, x0);
    _mm256_storeu_ps(stage + 8, x1);
    seen->any_gradient = _mm256_or_si256(seen->any_gradient,
                                         _mm256_or_si256(gc_abs8(g0), gc_abs8(g1)));
    seen->absmax = _mm256_max_epi32(seen->absmax, _mm256_max_epi32(gc_abs8(x0), gc_abs8(x1)));
    if (squares) {
        add_squares(seen, 0, x0);
        add_squares(seen, 2, x1);
    }
}

/* The elements of the group from `at` on; those past `numel` are 0. */
GC_AVX2_INLINE void take_rest(watch *seen, float *stage, const gc_block_view *view, uint32_t at,
                              uint32_t numel, int dtype, int squares)
{
    float g[VECTORS_NUMEL] = {0}, r[VECTORS_NUMEL] = {0};
    for (uint32_t j = 0; j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + at + j);
        r[j] = view->residual ? view->residual[at + j] : 0;
    }
    __m256 g0 = _mm256_loadu_ps(g), g1 = _mm256_loadu_ps(g + 8), x0 = g0, x1 = g1;
    if (view->residual) {
        x0 = _mm256_add_ps(g0, _mm256_loadu_ps(r));
        x1 = _mm256_add_ps(g1, _mm256_loadu_ps(r + 8));
    }
    take16(seen, stage, g0, g1, x0, x1, squares);
}

GC_AVX2_INLINE void take_body(gc_block_totals *totals, gc_block_stage *stage,
                              const gc_block_view *view, uint32_t chunk, uint32_t numel, int dtype,
                              int squares)
{
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256(), {_mm256_setzero_pd()}};
    for (uint32_t block = 0; block < numel; block += GC_BLOCK_NUMEL) {
        uint32_t end = numel - block < GC_BLOCK_NUMEL ? numel : block + GC_BLOCK_NUMEL, i = block;
        for (int j = 0; j < 4; j++)
            seen.lanes[j] = _mm256_setzero_pd();
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
            take16(&seen, stage->x + i, g0, g1, x0, x1, squares);
        }
        if (i < end)
            take_rest(&seen, stage->x + i, view, chunk + i, end - i, dtype, squares);
        if (squares)
            totals->sum_squares += gc_total16(seen.lanes);
    }
    uint32_t absmax = gc_max8(seen.absmax),
             padded = (numel + VECTORS_NUMEL - 1) / VECTORS_NUMEL * VECTORS_NUMEL;
    totals->absmax_bits = absmax > totals->absmax_bits ? absmax : totals->absmax_bits;
    totals->any_gradient |= !_mm256_testz_si256(seen.any_gradient, seen.any_gradient);
    /* what `emit` reads of the last 64 elements */
    memset(stage->x + padded, 0, 64 * sizeof(float));
}

GC_AVX2 void gc_take_squares_avx2(gc_block_totals *totals, gc_block_stage *stage,
                                  const gc_block_view *view, uint32_t chunk, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, stage, view, chunk, numel, GC_F32, 1),
                take_body(totals, stage, view, chunk, numel, GC_BF16, 1),
                take_body(totals, stage, view, chunk, numel, GC_F16, 1));
}

GC_AVX2 static void take(gc_block_totals *totals, gc_block_stage *stage, const gc_block_view *view,
                         uint32_t chunk, uint32_t numel)
{
    if (view->bits == 2)
        gc_take_squares_avx2(totals, stage, view, chunk, numel);
    else
        GC_BY_DTYPE(view->dtype, take_body(totals, stage, view, chunk, numel, GC_F32, 0),
                    take_body(totals, stage, view, chunk, numel, GC_BF16, 0),
                    take_body(totals, stage, view, chunk, numel, GC_F16, 0));
}

/* ---- codes ----------------------------------------------------------------------------------- */
typedef struct {
    __m256 scale, inverse, zero, top, half, decay;
} wide_levels;

/* Codes of eight elements in the lowest bytes of the lanes, and what they leave of them to
 * `left`. */
GC_AVX2_INLINE __m256i codes8(__m256 v, const wide_levels *levels, __m256 *left, int ternary)
{
    if (ternary) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        __m256 above = _mm256_cmp_ps(v, levels->half, _CMP_GT_OQ);
        __m256 below = _mm256_cmp_ps(v, _mm256_xor_ps(levels->half, sign), _CMP_LT_OQ);
        __m256 up = _mm256_and_ps(above, levels->scale),
               down = _mm256_and_ps(below, _mm256_xor_ps(levels->scale, sign));
        *left = _mm256_sub_ps(v, _mm256_or_ps(up, down));
        __m256i sum = _mm256_sub_epi32(_mm256_castps_si256(below), _mm256_castps_si256(above));
        return _mm256_add_epi32(sum, _mm256_set1_epi32(1));
    }
    const __m256 magic = _mm256_set1_ps(GC_ROUNDING_MAGIC);
    __m256 t = _mm256_add_ps(_mm256_mul_ps(v, levels->inverse), levels->zero);
    t = _mm256_min_ps(_mm256_max_ps(t, _mm256_setzero_ps()), levels->top);
    t = _mm256_add_ps(t, magic);
    __m256 code = _mm256_sub_ps(t, magic); /* exact */
    *left = _mm256_sub_ps(v, _mm256_mul_ps(_mm256_sub_ps(code, levels->zero), levels->scale));
    return _mm256_and_si256(_mm256_castps_si256(t), _mm256_set1_epi32(0xFF));
}

/* Codes of eight elements; with `out`, what they leave, decayed, whose magnitudes are added to
 * `all`. */
GC_AVX2_INLINE __m256i emit8(const float *x, const wide_levels *levels, float *out, int streams,
                             int ternary, __m256 *all)
{
    __m256 left;
    __m256i codes = codes8(_mm256_loadu_ps(x), levels, &left, ternary);
    if (out) {
        *all = _mm256_add_ps(*all, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), left));
        left = _mm256_mul_ps(left, levels->decay);
        if (streams)
            _mm256_stream_ps(out, left);
        else
            _mm256_storeu_ps(out, left);
    }
    return codes;
}

/* Four times eight codes as 32 bytes in order. */
GC_AVX2_INLINE __m256i bytes32(__m256i a, __m256i b, __m256i c, __m256i d)
{
    __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Write 32 codes, a byte each, in `bits` bits each. */
GC_AVX2_INLINE void put32(uint8_t *codes, __m256i bytes, unsigned bits)
{
    if (bits == 8) {
        _mm256_storeu_si256((__m256i *)codes, bytes);
        return;
    }
    __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(bits == 4 ? 0x1001 : 0x0401));
    if (bits == 4) {
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
        _mm_storeu_si128((__m128i *)codes, _mm256_castsi256_si128(packed));
        return;
    }
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(fours, fours), _mm256_setzero_si256());
    uint32_t low = (uint32_t)_mm256_extract_epi32(packed, 0),
             high = (uint32_t)_mm256_extract_epi32(packed, 4);
    memcpy(codes, &low, 4);
    memcpy(codes + 4, &high, 4);
}

/* The codes of 32 elements; the magnitudes of what they leave are added to four sums. */
GC_AVX2_INLINE void emit32(gc_block_stage *stage, const wide_levels *levels, uint32_t i, float *to,
                           int streams, unsigned bits, int ternary, __m256 all[4])
{
    const float *x = stage->x + i;
    __m256i a = emit8(x, levels, to, streams, ternary, &all[0]);
    __m256i b = emit8(x + 8, levels, to ? to + 8 : NULL, streams, ternary, &all[1]);
    __m256i c = emit8(x + 16, levels, to ? to + 16 : NULL, streams, ternary, &all[2]);
    __m256i d = emit8(x + 24, levels, to ? to + 24 : NULL, streams, ternary, &all[3]);
    put32(stage->codes + (size_t)i * bits / 8, bytes32(a, b, c, d), bits);
}

GC_AVX2_INLINE double emit_body(gc_block_stage *stage, const wide_levels *levels, uint32_t numel,
                                float *out, int streams, unsigned bits, int ternary)
{
    __m256 all[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                     _mm256_setzero_ps()};
    uint32_t i = 0;
    for (; i + 32 <= numel; i += 32)
        emit32(stage, levels, i, out ? out + i : NULL, streams, bits, ternary, all);
    double sum = gc_sum8(
        _mm256_add_ps(_mm256_add_ps(all[0], all[1]), _mm256_add_ps(all[2], all[3])));
    if (i < numel) {
        float rest[32], decay = _mm256_cvtss_f32(levels->decay);
        wide_levels whole = *levels;
        whole.decay = _mm256_set1_ps(1.0f);
        emit32(stage, &whole, i, rest, 0, bits, ternary, all);
        for (uint32_t j = 0; out && j < numel - i; j++) {
            out[i + j] = decay * rest[j];
            sum += rest[j] < 0 ? -rest[j] : rest[j];
        }
    }
    return sum;
}

GC_AVX2_INLINE double emit_bits(gc_block_stage *stage, const wide_levels *levels, uint32_t numel,
                                float *out, int streams, unsigned bits, int ternary)
{
    if (!out)
        return emit_body(stage, levels, numel, NULL, 0, bits, ternary);
    if (streams && (uintptr_t)out % 32 == 0)
        return emit_body(stage, levels, numel, out, 1, bits, ternary);
    return emit_body(stage, levels, numel, out, 0, bits, ternary);
}

GC_AVX2 static double emit(gc_block_stage *stage, const gc_block_view *view,
                           const gc_block_levels *levels, uint32_t numel, float *out, int streams)
{
    wide_levels wide = {_mm256_set1_ps(levels->scale), _mm256_set1_ps(levels->inverse),
                        _mm256_set1_ps(levels->zero),  _mm256_set1_ps(levels->top),
                        _mm256_set1_ps(levels->half),  _mm256_set1_ps(view->decay)};
    if (levels->ternary)
        return emit_bits(stage, &wide, numel, out, streams, 2, 1);
    if (view->bits == 2)
        return emit_bits(stage, &wide, numel, out, streams, 2, 0);
    if (view->bits == 4)
        return emit_bits(stage, &wide, numel, out, streams, 4, 0);
    return emit_bits(stage, &wide, numel, out, streams, 8, 0);
}

void gc_block_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_block_tier tier = {take, emit};
    gc_encode_blocks(job, segment, &tier);
}
#endif
