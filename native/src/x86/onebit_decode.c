/* onebit_decode.c - averages of 1-bit payloads: every lane shifts its bit to the sign position,
 * where a blend looks. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

enum { TOGETHER = 4 }; /* payloads whose values are added in registers */

/* How far lane l shifts up a window that starts at the byte of element `first`, for the elements
 * first + l. */
GC_AVX2_INLINE __m256i bit_shifts(uint32_t first)
{
    return _mm256_sub_epi32(_mm256_set1_epi32(31 - (int)(first % 8)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Bits i .. i + 7 after the window's first pick from the means. i is a multiple of 8. */
GC_AVX2_INLINE __m256 pick8(const uint8_t *codes, uint32_t i, __m256i shifts, __m256 mean0,
                            __m256 mean1)
{
    __m256i window = _mm256_set1_epi32((int)gc_load_u32(codes + i / 8));
    return _mm256_blendv_ps(mean0, mean1, _mm256_castsi256_ps(_mm256_sllv_epi32(window, shifts)));
}

GC_AVX2_INLINE __m256 mean8(const uint8_t *payload, const gc_segment *segment,
                            const gc_piece *piece, uint32_t bit)
{
    return _mm256_set1_ps(gc_scale(payload, segment, 2 * piece->run.group + bit));
}

/* ---- one payload, one group ------------------------------------------------------------------ */
GC_AVX2_INLINE void one_body(void *out, uint64_t index, uint32_t numel, const uint8_t *codes,
                             __m256i shifts, __m256 mean0, __m256 mean1, int dtype, int stream)
{
    for (uint32_t i = 0; i < numel; i += 8)
        gc_write8(out, dtype, index + i, pick8(codes, i, shifts, mean0, mean1), stream);
}

GC_AVX2 static int decode_one(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    uint8_t padded[GC_PADDED_NBYTES];
    const uint8_t *payload = job->payloads[0];
    __m256 mean0 = mean8(payload, segment, piece, 0), mean1 = mean8(payload, segment, piece, 1);
    if (gc_max8(_mm256_max_epi32(gc_abs8(mean0), gc_abs8(mean1))) >=
        gc_overflow_bits(job->out_dtype))
        return 0;
    const uint8_t *codes = gc_padded_codes(payload, segment, piece, 1, padded);
    GC_BY_OUTPUT(job, gc_piece_streams(job, segment, piece), one_body, job->out,
                 segment->data + piece->first, piece->numel, codes, bit_shifts(piece->first), mean0,
                 mean1);
    return 1;
}

/* ---- several payloads or groups -------------------------------------------------------------- */
/* Add the values of `count` payloads to the stage, in order; the first call starts it. */
GC_AVX2_INLINE void add_means(float *stage, uint32_t numel, const uint8_t *const *codes,
                              __m256i shifts, const __m256 *means0, const __m256 *means1, int count,
                              int starts)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 sum = pick8(codes[0], i, shifts, means0[0], means1[0]);
        if (!starts)
            sum = _mm256_add_ps(_mm256_loadu_ps(stage + i), sum);
        for (int p = 1; p < count; p++)
            sum = _mm256_add_ps(sum, pick8(codes[p], i, shifts, means0[p], means1[p]));
        _mm256_storeu_ps(stage + i, sum);
    }
}

/* Up to TOGETHER payloads, all elements in one group. */
GC_AVX2_INLINE void add_uniform(const uint8_t *const *payloads, const gc_segment *segment,
                                const gc_piece *piece, int count, int starts, float *stage)
{
    uint8_t padded[TOGETHER][GC_PIECE_NUMEL / 8 + 2 * GC_PADDING_NBYTES];
    const uint8_t *codes[TOGETHER];
    __m256 means0[TOGETHER], means1[TOGETHER];
    for (int q = 0; q < count; q++) {
        codes[q] = gc_padded_codes(payloads[q], segment, piece, 1, padded[q]);
        means0[q] = mean8(payloads[q], segment, piece, 0);
        means1[q] = mean8(payloads[q], segment, piece, 1);
    }
    __m256i shifts = bit_shifts(piece->first);
    if (count == 4)
        add_means(stage, piece->numel, codes, shifts, means0, means1, 4, starts);
    else if (count == 3)
        add_means(stage, piece->numel, codes, shifts, means0, means1, 3, starts);
    else if (count == 2)
        add_means(stage, piece->numel, codes, shifts, means0, means1, 2, starts);
    else
        add_means(stage, piece->numel, codes, shifts, means0, means1, 1, starts);
}

/* One payload, two means for each element. */
GC_AVX2_INLINE void add_scaled(const uint8_t *payload, const gc_segment *segment,
                               const gc_piece *piece, int starts, float *stage)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float means0[GC_STAGE_NUMEL], means1[GC_STAGE_NUMEL];
    const uint8_t *codes = gc_padded_codes(payload, segment, piece, 1, padded);
    __m256i shifts = bit_shifts(piece->first);
    gc_fill_scales(payload, segment, piece, 2, 0, means0);
    gc_fill_scales(payload, segment, piece, 2, 1, means1);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        __m256 value = pick8(codes, i, shifts, _mm256_loadu_ps(means0 + i),
                             _mm256_loadu_ps(means1 + i));
        _mm256_storeu_ps(stage + i,
                         starts ? value : _mm256_add_ps(_mm256_loadu_ps(stage + i), value));
    }
}

GC_AVX2 static int decode_piece(gc_decode_job *job, const gc_segment *segment,
                                const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
    if (job->payload_count == 1 && piece->is_uniform)
        return decode_one(job, segment, piece);
    for (size_t p = 0; p < job->payload_count;) {
        size_t left = job->payload_count - p;
        if (!piece->is_uniform) {
            add_scaled(job->payloads[p], segment, piece, p == 0, stage);
            p++;
            continue;
        }
        int count = left < TOGETHER ? (int)left : TOGETHER;
        add_uniform(job->payloads + p, segment, piece, count, p == 0, stage);
        p += (size_t)count;
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

void gc_onebit_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_onebit_decode_span);
}
#endif
