/* block_decode.c - averages of payloads of evenly spaced levels. */
#include "internal.h"

#if defined(__x86_64__)
#include "blocks.h"
#include "common.h"

enum { TOGETHER = 4 }; /* payloads whose values are added in registers */

/* Codes of a piece: from the byte that holds its first element on, which begins at bit `skipped` of
 * it. */
typedef struct {
    const uint8_t *bytes;
    unsigned skipped;
} code_stream;

/* Codes i .. i + 7, i a multiple of 8, as floats. */
GC_AVX2_INLINE __m256 codes8(const code_stream *codes, uint32_t i, unsigned bits)
{
    if (bits == 8)
        return _mm256_cvtepi32_ps(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes->bytes + i))));
    uint32_t window = (uint32_t)(gc_load_u64(codes->bytes + (size_t)i * bits / 8) >>
                                 codes->skipped);
    __m256i shifts = bits == 4 ? _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)
                               : _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    __m256i code = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)window), shifts),
                                    _mm256_set1_epi32((1 << bits) - 1));
    return _mm256_cvtepi32_ps(code);
}

GC_AVX2_INLINE __m256 values8(const code_stream *codes, uint32_t i, unsigned bits, __m256 scale)
{
    return _mm256_mul_ps(_mm256_sub_ps(codes8(codes, i, bits), _mm256_set1_ps(gc_block_zero(bits))),
                         scale);
}

GC_AVX2_INLINE code_stream stream_of(const uint8_t *payload, const gc_segment *segment,
                                     const gc_piece *piece, unsigned bits, uint8_t *padded)
{
    code_stream codes = {gc_padded_codes(payload, segment, piece, bits, padded),
                         (unsigned)(piece->first * bits % 8)};
    return codes;
}

/* ---- one payload, one group ------------------------------------------------------------------ */
GC_AVX2_INLINE void one_body(void *out, uint64_t index, uint32_t numel, const code_stream *codes,
                             unsigned bits, __m256 scale, int dtype, int stream)
{
    for (uint32_t i = 0; i < numel; i += 8)
        gc_write8(out, dtype, index + i, values8(codes, i, bits, scale), stream);
}

GC_AVX2_INLINE int one_bits(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece,
                            unsigned bits)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float scale = gc_scale(job->payloads[0], segment, piece->run.group);
    if (gc_abs_bits(scale * ((1 << bits) - gc_block_zero(bits))) >=
        gc_overflow_bits(job->out_dtype))
        return 0;
    code_stream codes = stream_of(job->payloads[0], segment, piece, bits, padded);
    GC_BY_OUTPUT(job, gc_piece_streams(job, segment, piece), one_body, job->out,
                 segment->data + piece->first, piece->numel, &codes, bits, _mm256_set1_ps(scale));
    return 1;
}

/* ---- several payloads or groups -------------------------------------------------------------- */
/* Add the values of `count` payloads to the stage, in order; the first call starts it. */
GC_AVX2_INLINE void add_streams(float *stage, uint32_t numel, const code_stream *codes,
                                const __m256 *scales, unsigned bits, int count, int starts)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 sum = values8(&codes[0], i, bits, scales[0]);
        if (!starts)
            sum = _mm256_add_ps(_mm256_loadu_ps(stage + i), sum);
        for (int p = 1; p < count; p++)
            sum = _mm256_add_ps(sum, values8(&codes[p], i, bits, scales[p]));
        _mm256_storeu_ps(stage + i, sum);
    }
}

/* Up to TOGETHER payloads, all elements in one group. */
GC_AVX2_INLINE void add_uniform(const uint8_t *const *payloads, const gc_segment *segment,
                                const gc_piece *piece, unsigned bits, int count, int starts,
                                float *stage)
{
    uint8_t padded[TOGETHER][GC_PIECE_NUMEL + 2 * GC_PADDING_NBYTES];
    code_stream codes[TOGETHER];
    __m256 scales[TOGETHER];
    for (int q = 0; q < count; q++) {
        codes[q] = stream_of(payloads[q], segment, piece, bits, padded[q]);
        scales[q] = _mm256_set1_ps(gc_scale(payloads[q], segment, piece->run.group));
    }
    if (count == 4)
        add_streams(stage, piece->numel, codes, scales, bits, 4, starts);
    else if (count == 3)
        add_streams(stage, piece->numel, codes, scales, bits, 3, starts);
    else if (count == 2)
        add_streams(stage, piece->numel, codes, scales, bits, 2, starts);
    else
        add_streams(stage, piece->numel, codes, scales, bits, 1, starts);
}

/* One payload, a scale for each element. */
GC_AVX2_INLINE void add_scaled(const uint8_t *payload, const gc_segment *segment,
                               const gc_piece *piece, unsigned bits, int starts, float *stage)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float scales[GC_STAGE_NUMEL];
    code_stream codes = stream_of(payload, segment, piece, bits, padded);
    gc_fill_scales(payload, segment, piece, 1, 0, scales);
    for (uint32_t i = 0; i < piece->numel; i += 8) {
        __m256 value = values8(&codes, i, bits, _mm256_loadu_ps(scales + i));
        _mm256_storeu_ps(stage + i,
                         starts ? value : _mm256_add_ps(_mm256_loadu_ps(stage + i), value));
    }
}

GC_AVX2_INLINE int piece_bits(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece,
                              unsigned bits)
{
    float stage[GC_STAGE_NUMEL];
    if (job->payload_count == 1 && piece->is_uniform)
        return one_bits(job, segment, piece, bits);
    for (size_t p = 0; p < job->payload_count;) {
        size_t left = job->payload_count - p;
        if (!piece->is_uniform) {
            add_scaled(job->payloads[p], segment, piece, bits, p == 0, stage);
            p++;
            continue;
        }
        int count = left < TOGETHER ? (int)left : TOGETHER;
        add_uniform(job->payloads + p, segment, piece, bits, count, p == 0, stage);
        p += (size_t)count;
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

GC_AVX2 static int decode_piece(gc_decode_job *job, const gc_segment *segment,
                                const gc_piece *piece)
{
    if (job->code_bits == 2)
        return piece_bits(job, segment, piece, 2);
    return job->code_bits == 4 ? piece_bits(job, segment, piece, 4)
                               : piece_bits(job, segment, piece, 8);
}

void gc_block_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_block_decode_span);
}
#endif
