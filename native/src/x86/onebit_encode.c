/* onebit_encode.c - 1-bit codes, class means and the new residual, group by group.
 *
 * A group of at most GC_ONEBIT_STAGE_NUMEL elements is read from memory once: x = g + r is staged in the first-level
 * cache for the second pass. Larger groups go chunk by chunk and read g and r twice. A group with values that are not
 * finite is left to the portable encoder before its residual is touched.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

enum { CHUNK_NUMEL = GC_ONEBIT_STAGE_NUMEL, VECTORS_NUMEL = 16, PREFETCH_NUMEL = 1024, STREAM_NUMEL = 1 << 15 };

/* One chunk of x; both arrays are padded with zeros to whole vectors and words. */
typedef struct {
    float x[CHUNK_NUMEL];
    uint8_t bits[CHUNK_NUMEL / 8];
} chunk_stage;

typedef struct {
    double sums[2];
    uint32_t ones;
    __m256i any_gradient; /* all bits of |g| seen */
    __m256i absmax;       /* of x */
} group_state;

/* Sixteen lanes of a block's two class sums. */
typedef struct {
    __m256d zeros[4], ones[4];
} class_lanes;

GC_AVX2_INLINE void add8(class_lanes *lanes, int j, __m256 x)
{
    const __m256d zero = _mm256_setzero_pd();
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
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
GC_AVX2_INLINE void take16(group_state *state, class_lanes *lanes, chunk_stage *stage, uint32_t i, __m256 g0, __m256 g1,
                           __m256 x0, __m256 x1)
{
    _mm256_storeu_ps(stage->x + i, x0);
    _mm256_storeu_ps(stage->x + i + 8, x1);
    stage->bits[i / 8] = bits8(x0);
    stage->bits[i / 8 + 1] = bits8(x1);
    state->any_gradient = _mm256_or_si256(state->any_gradient, _mm256_or_si256(gc_abs8(g0), gc_abs8(g1)));
    state->absmax = _mm256_max_epi32(state->absmax, _mm256_max_epi32(gc_abs8(x0), gc_abs8(x1)));
    add8(lanes, 0, x0);
    add8(lanes, 2, x1);
}

/* The part of the tensors that a call works on. */
typedef struct {
    const void *src;
    uint64_t data;
    const float *residual; /* NULL: none */
} source_view;

GC_AVX2_INLINE void take_rest(group_state *state, class_lanes *lanes, chunk_stage *stage, const source_view *view,
                              uint32_t chunk, uint32_t i, uint32_t numel, int dtype)
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
    take16(state, lanes, stage, i, g0, g1, x0, x1);
}

/* Stage `numel` elements from element `chunk` of the group on. */
GC_AVX2_INLINE void take_chunk(group_state *state, chunk_stage *stage, const source_view *view, uint32_t chunk,
                               uint32_t numel, int dtype)
{
    for (uint32_t block = 0; block < numel; block += GC_BLOCK_NUMEL) {
        uint32_t end = numel - block < GC_BLOCK_NUMEL ? numel : block + GC_BLOCK_NUMEL, i = block;
        class_lanes lanes;
        for (int j = 0; j < 4; j++)
            lanes.zeros[j] = lanes.ones[j] = _mm256_setzero_pd();
        for (; i + VECTORS_NUMEL <= end; i += VECTORS_NUMEL) {
            uint64_t at = view->data + chunk + i;
            __m256 g0 = gc_load8(view->src, dtype, at), g1 = gc_load8(view->src, dtype, at + 8), x0 = g0, x1 = g1;
            gc_prefetch(view->src, dtype, at + PREFETCH_NUMEL);
            if (view->residual) {
                gc_prefetch(view->residual, GC_F32, chunk + i + PREFETCH_NUMEL);
                x0 = _mm256_add_ps(g0, _mm256_loadu_ps(view->residual + chunk + i));
                x1 = _mm256_add_ps(g1, _mm256_loadu_ps(view->residual + chunk + i + 8));
            }
            take16(state, &lanes, stage, i, g0, g1, x0, x1);
        }
        if (i < end)
            take_rest(state, &lanes, stage, view, chunk, i, end, dtype);
        state->sums[0] += gc_total16(lanes.zeros);
        state->sums[1] += gc_total16(lanes.ones);
    }
}

/* Append the staged bits at bit `position` of the segment's codes; what is above them in the last byte becomes 0. Bits
 * of earlier groups in the first byte stay. Returns the number of ones. */
GC_AVX2 static uint32_t put_bits(uint8_t *codes, uint32_t position, chunk_stage *stage, uint32_t numel)
{
    uint8_t shifted[CHUNK_NUMEL / 8 + 8];
    uint32_t ones = 0, words = (numel + 63) / 64, offset = position % 8;
    size_t nbytes = gc_code_nbytes(offset + numel, 1);
    uint64_t carry = offset ? codes[position / 8] & ((1u << offset) - 1) : 0;
    uint32_t taken = (numel + VECTORS_NUMEL - 1) / VECTORS_NUMEL * VECTORS_NUMEL / 8; /* bytes that take16 wrote */
    memset(stage->bits + taken, 0, 8 * words - taken);
    for (uint32_t w = 0; w < words; w++) {
        uint64_t bits, out;
        memcpy(&bits, stage->bits + 8 * w, 8);
        ones += (uint32_t)__builtin_popcountll(bits);
        out = bits << offset | carry;
        carry = offset ? bits >> (64 - offset) : 0;
        memcpy(shifted + 8 * w, &out, 8);
    }
    memcpy(shifted + 8 * words, &carry, 8);
    memcpy(codes + position / 8, shifted, nbytes);
    return ones;
}

/* r' = x - q for eight elements. */
GC_AVX2_INLINE __m256 left8(__m256 x, __m256 mean0, __m256 mean1)
{
    __m256 is_one = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_sub_ps(x, _mm256_blendv_ps(mean0, mean1, is_one));
}

/* The residual of a staged chunk. A plane of its own is not read before the next step: `streams` writes past the caches,
 * which saves reading each line first. */
GC_AVX2_INLINE void leave_staged(const chunk_stage *stage, uint32_t numel, float mean0, float mean1, float *out,
                                 int streams)
{
    __m256 m0 = _mm256_set1_ps(mean0), m1 = _mm256_set1_ps(mean1);
    uint32_t i = 0;
    if (streams && (uintptr_t)out % 32 == 0)
        for (; i + 8 <= numel; i += 8)
            _mm256_stream_ps(out + i, left8(_mm256_loadu_ps(stage->x + i), m0, m1));
    for (; i + 8 <= numel; i += 8)
        _mm256_storeu_ps(out + i, left8(_mm256_loadu_ps(stage->x + i), m0, m1));
    for (; i < numel; i++)
        out[i] = stage->x[i] - (stage->x[i] > 0 ? mean1 : mean0);
}

/* The residual of a group that was not staged whole: x is made again. `out` may be view->residual. */
GC_AVX2_INLINE void leave_again(const source_view *view, uint32_t numel, float mean0, float mean1, float *out,
                                int dtype)
{
    __m256 m0 = _mm256_set1_ps(mean0), m1 = _mm256_set1_ps(mean1);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        __m256 x = gc_load8(view->src, dtype, view->data + i);
        if (view->residual)
            x = _mm256_add_ps(x, _mm256_loadu_ps(view->residual + i));
        _mm256_storeu_ps(out + i, left8(x, m0, m1));
    }
    for (; i < numel; i++) {
        float g = gc_load(view->src, dtype, view->data + i), x = view->residual ? g + view->residual[i] : g;
        out[i] = x - (x > 0 ? mean1 : mean0);
    }
}

/* Encode one group; 0 when it holds a value that is not finite (then no residual was written). */
GC_AVX2_INLINE int encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run, chunk_stage *stage,
                                int dtype)
{
    group_state state = {{0, 0}, 0, _mm256_setzero_si256(), _mm256_setzero_si256()};
    uint64_t residual = segment->residual + run.first;
    source_view view = {job->src, segment->data + run.first, job->residual_in ? job->residual_in + residual : NULL};
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        take_chunk(&state, stage, &view, chunk, numel, dtype);
        state.ones += put_bits(job->payload + segment->codes, run.first + chunk, stage, numel);
    }
    if (gc_max8(state.absmax) >= GC_INF_BITS)
        return 0;
    uint32_t zeros = run.numel - state.ones;
    int has_gradient = !_mm256_testz_si256(state.any_gradient, state.any_gradient);
    float mean0 = has_gradient && zeros ? (float)(state.sums[0] / zeros) : 0;
    float mean1 = has_gradient && state.ones ? (float)(state.sums[1] / state.ones) : 0;
    uint8_t *scales = job->payload + segment->scales + 8 * (size_t)run.group;
    gc_store_u32(scales, gc_bits_of(mean0));
    gc_store_u32(scales + 4, gc_bits_of(mean1));
    if (job->residual_out && run.numel <= CHUNK_NUMEL)
        leave_staged(stage, run.numel, mean0, mean1, job->residual_out + residual,
                     job->residual_out != job->residual_in && segment->numel >= STREAM_NUMEL);
    else if (job->residual_out)
        leave_again(&view, run.numel, mean0, mean1, job->residual_out + residual, dtype);
    return 1;
}

GC_AVX2_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment, int dtype)
{
    chunk_stage stage;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        if (!encode_group(job, segment, run, &stage, dtype))
            gc_onebit_group(job, segment, run);
        i += run.numel;
    }
    _mm_sfence();
}

GC_AVX2 void gc_onebit_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    GC_BY_DTYPE(job->dtype, encode_body(job, segment, GC_F32), encode_body(job, segment, GC_BF16),
                encode_body(job, segment, GC_F16));
}
#endif
