/* ternary_decode.c - averages of ternary payloads.
 *
 * A code picks its value from a table of four in a vector register (permutevar looks at two bits),
 * which takes fewer instructions than converting integers. Codes are at any bit position: a 32-bit
 * window is broadcast and each lane shifts its code down. Integer sums of several payloads with one
 * scale are made in bytes first.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

enum { TOGETHER = 4 }; /* payloads whose values are added in registers */

/* How far lane l shifts a window that starts at the byte of element `first`, for the elements first
 * + l. */
GC_AVX2_INLINE __m256i code_shifts(uint32_t first)
{
    return _mm256_add_epi32(_mm256_set1_epi32((int)(2 * (first % 4))),
                            _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
}

/* Codes i .. i + 7 after the window's first, in the low two bits of each lane. i is a multiple of
 * 8. */
GC_AVX2_INLINE __m256i codes8(const uint8_t *codes, uint32_t i, __m256i shifts)
{
    return _mm256_srlv_epi32(_mm256_set1_epi32((int)gc_load_u32(codes + i / 4)), shifts);
}

/* The values of the codes 0 .. 3 with scale S, as the portable tier computes them. */
GC_AVX2_INLINE __m256 value_table(float scale)
{
    return _mm256_mul_ps(_mm256_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2), _mm256_set1_ps(scale));
}

/* ---- one payload, one group ------------------------------------------------------------------ */
GC_AVX2_INLINE void one_body(void *out, uint64_t index, uint32_t numel, const uint8_t *codes,
                             __m256i shifts, __m256 table, int dtype, int stream)
{
    for (uint32_t i = 0; i < numel; i += 8)
        gc_write8(out, dtype, index + i, _mm256_permutevar_ps(table, codes8(codes, i, shifts)),
                  stream);
}

GC_AVX2 static int decode_one(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float scale = gc_scale(job->payloads[0], segment, piece->run.group);
    if (gc_abs_bits(scale) >= gc_overflow_bits(job->out_dtype))
        return 0;
    const uint8_t *codes = gc_padded_codes(job->payloads[0], segment, piece, 2, padded);
    GC_BY_OUTPUT(job, gc_piece_streams(job, segment, piece), one_body, job->out,
                 segment->data + piece->first, piece->numel, codes, code_shifts(piece->first),
                 value_table(scale));
    return 1;
}

/* ---- a scale for each payload ---------------------------------------------------------------- */
/* Add the values of `count` payloads to the stage, in order; the first call starts it. */
GC_AVX2_INLINE void add_tables(float *stage, uint32_t numel, const uint8_t *const *codes,
                               const __m256 *tables, __m256i shifts, int count, int starts)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 sum = _mm256_permutevar_ps(tables[0], codes8(codes[0], i, shifts));
        if (!starts)
            sum = _mm256_add_ps(_mm256_loadu_ps(stage + i), sum);
        for (int p = 1; p < count; p++)
            sum = _mm256_add_ps(sum, _mm256_permutevar_ps(tables[p], codes8(codes[p], i, shifts)));
        _mm256_storeu_ps(stage + i, sum);
    }
}

/* Up to TOGETHER payloads, all elements in one group. */
GC_AVX2_INLINE void add_uniform(const uint8_t *const *payloads, const gc_segment *segment,
                                const gc_piece *piece, int count, int starts, float *stage)
{
    uint8_t padded[TOGETHER][GC_PIECE_NUMEL / 4 + 2 * GC_PADDING_NBYTES];
    const uint8_t *codes[TOGETHER];
    __m256 tables[TOGETHER];
    for (int q = 0; q < count; q++) {
        codes[q] = gc_padded_codes(payloads[q], segment, piece, 2, padded[q]);
        tables[q] = value_table(gc_scale(payloads[q], segment, piece->run.group));
    }
    __m256i shifts = code_shifts(piece->first);
    if (count == 4)
        add_tables(stage, piece->numel, codes, tables, shifts, 4, starts);
    else if (count == 3)
        add_tables(stage, piece->numel, codes, tables, shifts, 3, starts);
    else if (count == 2)
        add_tables(stage, piece->numel, codes, tables, shifts, 2, starts);
    else
        add_tables(stage, piece->numel, codes, tables, shifts, 1, starts);
}

/* One payload, a scale for each element. */
GC_AVX2_INLINE void add_scaled(const uint8_t *payload, const gc_segment *segment,
                               const gc_piece *piece, int starts, float *stage)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float scales[GC_STAGE_NUMEL];
    const uint8_t *codes = gc_padded_codes(payload, segment, piece, 2, padded);
    const __m256 units = _mm256_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2);
    __m256i shifts = code_shifts(piece->first);
    gc_fill_scales(payload, segment, piece, 1, 0, scales);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        __m256 unit = _mm256_permutevar_ps(units, codes8(codes, i, shifts));
        __m256 value = _mm256_mul_ps(unit, _mm256_loadu_ps(scales + i));
        _mm256_storeu_ps(stage + i,
                         starts ? value : _mm256_add_ps(_mm256_loadu_ps(stage + i), value));
    }
}

GC_AVX2 static int decode_own(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
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

/* ---- one scale for all payloads -------------------------------------------------------------- */
/* Sums of two codes are at most 6, also of codes that are none, and pick their value from a table
 * of eight. */
GC_AVX2_INLINE void pairs_body(void *out, uint64_t index, uint32_t numel, const uint8_t *sums,
                               __m256 table, int dtype, int stream)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256i sum = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(sums + i)));
        gc_write8(out, dtype, index + i, _mm256_permutevar8x32_ps(table, sum), stream);
    }
}

GC_AVX2_INLINE void sums_body(void *out, uint64_t index, uint32_t numel, const uint8_t *sums,
                              int payload_count, float factor, int dtype, int stream)
{
    const __m256i count = _mm256_set1_epi32(payload_count);
    const __m256 factors = _mm256_set1_ps(factor);
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256i sum = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(sums + i)));
        __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sum, count)), factors);
        gc_write8(out, dtype, index + i, x, stream);
    }
}

/* One group: a value is k * (S / N) with |k| <= 2 N, whatever the codes; 0 if that may not be
 * finite. */
GC_AVX2 static int write_sums(const gc_decode_job *job, const gc_segment *segment,
                              const gc_piece *piece, const uint8_t *sums)
{
    int count = (int)job->payload_count;
    float factor = gc_scale(job->payloads[0], segment, piece->run.group) / (float)count;
    if (gc_abs_bits(2.0f * (float)count * factor) >= gc_overflow_bits(job->out_dtype))
        return 0;
    uint64_t index = segment->data + piece->first;
    int streams = gc_piece_streams(job, segment, piece);
    if (count == 2) {
        __m256 table = _mm256_mul_ps(_mm256_setr_ps(-2, -1, 0, 1, 2, 3, 4, 5),
                                     _mm256_set1_ps(factor));
        GC_BY_OUTPUT(job, streams, pairs_body, job->out, index, piece->numel, sums, table);
    } else {
        GC_BY_OUTPUT(job, streams, sums_body, job->out, index, piece->numel, sums, count, factor);
    }
    return 1;
}

/* A scale for each element. */
GC_AVX2 static int write_scaled_sums(const gc_decode_job *job, const gc_segment *segment,
                                     const gc_piece *piece, const uint8_t *sums)
{
    float stage[GC_STAGE_NUMEL], scales[GC_STAGE_NUMEL];
    const __m256i count = _mm256_set1_epi32((int)job->payload_count);
    const __m256 divisor = _mm256_set1_ps((float)job->payload_count);
    gc_fill_scales(job->payloads[0], segment, piece, 1, 0, scales);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        __m256i sum = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(sums + i)));
        __m256 k = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, count));
        _mm256_storeu_ps(stage + i,
                         _mm256_mul_ps(k, _mm256_div_ps(_mm256_loadu_ps(scales + i), divisor)));
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f);
}

GC_AVX2 static int decode_shared(gc_decode_job *job, const gc_segment *segment,
                                 const gc_piece *piece)
{
    uint8_t sums[GC_PIECE_NUMEL + 2 * GC_SUMS_BLOCK_NUMEL];
    uint32_t skipped = piece->first % 4; /* elements of the first byte before the piece */
    gc_byte_sums(job, segment, piece->first / 4, skipped + piece->numel, sums);
    return piece->is_uniform ? write_sums(job, segment, piece, sums + skipped)
                             : write_scaled_sums(job, segment, piece, sums + skipped);
}

GC_AVX2 static int decode_piece(gc_decode_job *job, const gc_segment *segment,
                                const gc_piece *piece)
{
    if (job->payload_count == 1 && piece->is_uniform)
        return decode_one(job, segment, piece);
    if (!job->shared)
        return decode_own(job, segment, piece);
    return job->payload_count <= GC_BYTE_SUMS_PAYLOADS && decode_shared(job, segment, piece);
}

void gc_ternary_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_ternary_decode_span);
}
#endif
