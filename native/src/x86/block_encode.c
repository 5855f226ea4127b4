/* block_encode.c - evenly spaced levels with error feedback, ternary ones too; blocks.c walks the
 * groups. */
#include "internal.h"

#if defined(__x86_64__)
#include "blocks.h"
#include "common.h"

enum { VECTORS_NUMEL = 16, PREFETCH_NUMEL = 512 };

/* Bits of g seen, and the largest |x| or sixteen lanes of a block's sum of squares. */
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
                                         _mm256_castps_si256(_mm256_or_ps(g0, g1)));
    if (squares) {
        add_squares(seen, 0, x0);
        add_squares(seen, 2, x1);
    } else {
        seen->absmax = _mm256_max_epi32(seen->absmax, _mm256_max_epi32(gc_abs8(x0), gc_abs8(x1)));
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

/* Elements of the group from `first` on, as many of `numel` as are whole vectors; returns their
 * number. */
GC_AVX2_INLINE uint32_t take_vectors(watch *seen, float *x, const gc_block_view *view,
                                     uint32_t first, uint32_t numel, int dtype, int squares)
{
    const void *src = view->src;
    const float *residual = view->residual;
    uint64_t at = view->data + first;
    uint32_t i = 0;
    for (; i + VECTORS_NUMEL <= numel; i += VECTORS_NUMEL) {
        __m256 g0 = gc_load8(src, dtype, at + i), g1 = gc_load8(src, dtype, at + i + 8), x0 = g0,
               x1 = g1;
        gc_prefetch(src, dtype, at + i + PREFETCH_NUMEL);
        if (residual) {
            gc_prefetch(residual, GC_F32, first + i + PREFETCH_NUMEL);
            x0 = _mm256_add_ps(g0, _mm256_loadu_ps(residual + first + i));
            x1 = _mm256_add_ps(g1, _mm256_loadu_ps(residual + first + i + 8));
        }
        take16(seen, x + i, g0, g1, x0, x1, squares);
    }
    return i;
}

GC_AVX2_INLINE void count_seen(gc_block_totals *totals, const watch *seen, int squares)
{
    uint32_t absmax = gc_max8(seen->absmax);
    if (squares)
        gc_add_squares(totals, gc_total16(seen->lanes));
    else if (absmax > totals->absmax_bits)
        totals->absmax_bits = absmax;
    totals->any_gradient |= !_mm256_testz_si256(seen->any_gradient, _mm256_set1_epi32(GC_ABS_MASK));
}

GC_AVX2_INLINE void take_body(gc_block_totals *totals, float *x, const gc_block_view *view,
                              uint32_t first, uint32_t numel, int dtype, int squares)
{
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256(), {_mm256_setzero_pd()}};
    uint32_t i = take_vectors(&seen, x, view, first, numel, dtype, squares);
    if (i < numel)
        take_rest(&seen, x + i, view, first + i, numel - i, dtype, squares);
    count_seen(totals, &seen, squares);
}

GC_AVX2 void gc_take_squares_avx2(gc_block_totals *totals, float *x, const gc_block_view *view,
                                  uint32_t first, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, x, view, first, numel, GC_F32, 1),
                take_body(totals, x, view, first, numel, GC_BF16, 1),
                take_body(totals, x, view, first, numel, GC_F16, 1));
}

GC_AVX2 static void take(gc_block_totals *totals, float *x, const gc_block_view *view,
                         uint32_t first, uint32_t numel)
{
    if (view->bits == 2)
        gc_take_squares_avx2(totals, x, view, first, numel);
    else
        GC_BY_DTYPE(view->dtype, take_body(totals, x, view, first, numel, GC_F32, 0),
                    take_body(totals, x, view, first, numel, GC_BF16, 0),
                    take_body(totals, x, view, first, numel, GC_F16, 0));
}

/* ---- codes ----------------------------------------------------------------------------------- */
typedef struct {
    __m256 scale, inverse, zero, top, half, decay;
} wide_levels;

GC_AVX2_INLINE wide_levels spread(const gc_block_staged *staged)
{
    const gc_block_levels *levels = &staged->levels;
    wide_levels wide = {_mm256_set1_ps(levels->scale), _mm256_set1_ps(levels->inverse),
                        _mm256_set1_ps(levels->zero),  _mm256_set1_ps(levels->top),
                        _mm256_set1_ps(levels->half),  _mm256_set1_ps(staged->decay)};
    return wide;
}

/* Write what codes leave of eight elements to `out`, decayed; add their magnitudes to `all`. */
GC_AVX2_INLINE void leave8(__m256 left, const wide_levels *levels, float *out, int streams,
                           __m256 *all)
{
    *all = _mm256_add_ps(*all, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), left));
    left = _mm256_mul_ps(left, levels->decay);
    if (streams)
        _mm256_stream_ps(out, left);
    else
        _mm256_storeu_ps(out, left);
}

/* Codes of eight elements in the lowest bytes of the lanes; with `out`, their rest. */
GC_AVX2_INLINE __m256i codes8(const float *x, const wide_levels *levels, float *out, int streams,
                              __m256 *all)
{
    const __m256 magic = _mm256_set1_ps(GC_ROUNDING_MAGIC);
    __m256 v = _mm256_loadu_ps(x);
    __m256 t = _mm256_add_ps(_mm256_mul_ps(v, levels->inverse), levels->zero);
    t = _mm256_min_ps(_mm256_max_ps(t, _mm256_setzero_ps()), levels->top);
    t = _mm256_add_ps(t, magic);
    __m256 code = _mm256_sub_ps(t, magic); /* exact */
    if (out)
        leave8(_mm256_sub_ps(v, _mm256_mul_ps(_mm256_sub_ps(code, levels->zero), levels->scale)),
               levels, out, streams, all);
    return _mm256_and_si256(_mm256_castps_si256(t), _mm256_set1_epi32(0xFF));
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

GC_AVX2_INLINE void even32(const float *x, uint8_t *codes, const wide_levels *levels, float *out,
                           int streams, unsigned bits, __m256 *all)
{
    __m256i a = codes8(x, levels, out, streams, all);
    __m256i b = codes8(x + 8, levels, out ? out + 8 : NULL, streams, all);
    __m256i c = codes8(x + 16, levels, out ? out + 16 : NULL, streams, all);
    __m256i d = codes8(x + 24, levels, out ? out + 24 : NULL, streams, all);
    put32(codes, bytes32(a, b, c, d), bits);
}

/* Ternary codes of eight elements, less 1; with `out`, their rest. */
GC_AVX2_INLINE __m256i ternary8(const float *x, const wide_levels *levels, float *out, int streams,
                                __m256 *all)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v = _mm256_loadu_ps(x);
    __m256 above = _mm256_cmp_ps(v, levels->half, _CMP_GT_OQ);
    __m256 below = _mm256_cmp_ps(v, _mm256_xor_ps(levels->half, sign), _CMP_LT_OQ);
    __m256 up = _mm256_and_ps(above, levels->scale),
           down = _mm256_and_ps(below, _mm256_xor_ps(levels->scale, sign));
    if (out)
        leave8(_mm256_sub_ps(v, _mm256_or_ps(up, down)), levels, out, streams, all);
    return _mm256_sub_epi32(_mm256_castps_si256(below), _mm256_castps_si256(above));
}

/* The codes of 32 elements, less 85, four in a lane: 0-3, 8-11, 16-19, 24-27, then 4-7 etc. */
GC_AVX2_INLINE __m256i ternary32(const float *x, const wide_levels *levels, float *out, int streams,
                                 __m256 *all)
{
    __m256i a = ternary8(x, levels, out, streams, all);
    __m256i b = ternary8(x + 8, levels, out ? out + 8 : NULL, streams, all);
    __m256i c = ternary8(x + 16, levels, out ? out + 16 : NULL, streams, all);
    __m256i d = ternary8(x + 24, levels, out ? out + 24 : NULL, streams, all);
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(4 << 8 | 1), bytes);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(16 << 16 | 1));
}

GC_AVX2_INLINE void ternary64(const float *x, uint8_t *codes, const wide_levels *levels, float *out,
                              int streams, __m256 *all)
{
    __m256i low = ternary32(x, levels, out, streams, all);
    __m256i high = ternary32(x + 32, levels, out ? out + 32 : NULL, streams, all);
    /* a lane of a code byte each: those of even index, then the odd ones */
    __m256i lanes = _mm256_add_epi16(_mm256_packs_epi32(low, high), _mm256_set1_epi16(85));
    _mm_storeu_si128((__m128i *)codes,
                     _mm_or_si128(_mm256_castsi256_si128(lanes),
                                  _mm_slli_epi16(_mm256_extracti128_si256(lanes, 1), 8)));
}

/* 64 elements; `bits` of 0 are ternary codes. */
GC_AVX2_INLINE void emit64(const float *x, uint8_t *codes, const wide_levels *levels, float *out,
                           int streams, unsigned bits, __m256 *all)
{
    if (!bits) {
        ternary64(x, codes, levels, out, streams, all);
        return;
    }
    even32(x, codes, levels, out, streams, bits, all);
    even32(x + 32, codes + 4 * bits, levels, out ? out + 32 : NULL, streams, bits, all);
}

GC_AVX2_INLINE double emit_body(const gc_block_staged *staged, uint32_t numel, float *out,
                                int streams, unsigned bits)
{
    wide_levels levels = spread(staged);
    __m256 all = _mm256_setzero_ps(), ignored;
    uint32_t i = 0;
    for (; i + 64 <= numel; i += 64)
        emit64(staged->x + i, staged->codes + (size_t)i * staged->bits / 8, &levels,
               out ? out + i : NULL, streams, bits, &all);
    double sum = gc_sum8(all);
    if (i < numel) {
        float rest[64];
        levels.decay = _mm256_set1_ps(1.0f);
        ignored = all;
        emit64(staged->x + i, staged->codes + (size_t)i * staged->bits / 8, &levels, rest, 0, bits,
               &ignored);
        for (uint32_t j = 0; out && j < numel - i; j++) {
            out[i + j] = staged->decay * rest[j];
            sum += rest[j] < 0 ? -rest[j] : rest[j];
        }
    }
    return sum;
}

GC_AVX2_INLINE double emit_bits(const gc_block_staged *staged, uint32_t numel, unsigned bits)
{
    if (!staged->out)
        return emit_body(staged, numel, NULL, 0, bits);
    if (staged->streams && (uintptr_t)staged->out % 32 == 0)
        return emit_body(staged, numel, staged->out, 1, bits);
    return emit_body(staged, numel, staged->out, 0, bits);
}

GC_AVX2 static double emit(const gc_block_staged *staged, uint32_t numel)
{
    if (staged->levels.ternary)
        return emit_bits(staged, numel, 0);
    if (staged->bits == 2)
        return emit_bits(staged, numel, 2);
    if (staged->bits == 4)
        return emit_bits(staged, numel, 4);
    return emit_bits(staged, numel, 8);
}

/* ---- both in turn ---------------------------------------------------------------------------- */
/* One pass waits for memory, the other does not: a core that has both in sight does them in two
 * thirds of the time. */
GC_AVX2_INLINE double both_body(gc_block_totals *totals, float *x, const gc_block_view *view,
                                uint32_t first, uint32_t numel, const gc_block_staged *staged,
                                int dtype)
{
    const wide_levels levels = spread(staged);
    const gc_block_staged from = *staged;
    const int streams = from.streams && (uintptr_t)from.out % 32 == 0;
    __m256 all = _mm256_setzero_ps();
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256(), {_mm256_setzero_pd()}};
    for (uint32_t i = 0; i < numel; i += 64) {
        take_vectors(&seen, x + i, view, first + i, 64, dtype, 1);
        ternary64(from.x + i, from.codes + i / 4, &levels, from.out + i, streams, &all);
    }
    count_seen(totals, &seen, 1);
    return gc_sum8(all);
}

GC_AVX2 static double both(gc_block_totals *totals, float *x, const gc_block_view *view,
                           uint32_t first, uint32_t numel, const gc_block_staged *staged)
{
    double left;
    GC_BY_DTYPE(view->dtype, left = both_body(totals, x, view, first, numel, staged, GC_F32),
                left = both_body(totals, x, view, first, numel, staged, GC_BF16),
                left = both_body(totals, x, view, first, numel, staged, GC_F16));
    return left;
}

void gc_block_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_block_tier tier = {take, emit, both};
    gc_encode_blocks(job, segment, &tier);
}
#endif
