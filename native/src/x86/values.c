/* values.c - plain fp32 and bf16 values, eight at a time. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

/* ---- encode ---------------------------------------------------------------------------------- */
GC_AVX2_INLINE __m256i encode_span(const void *src, uint64_t index, uint32_t numel, int value_dtype,
                                   uint8_t *values, int dtype)
{
    __m256i absmax = _mm256_setzero_si256();
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 x = gc_load8(src, dtype, index + i);
        absmax = _mm256_max_epi32(absmax, gc_abs8(x));
        if (value_dtype == GC_F32)
            _mm256_storeu_ps((float *)(values + 4 * (size_t)i), x);
        else
            _mm_storeu_si128((__m128i *)(values + 2 * (size_t)i), gc_to_bf16x8(x));
    }
    return absmax;
}

GC_AVX2 void gc_values_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    size_t size = job->value_dtype == GC_F32 ? 4 : 2;
    for (uint32_t first = 0; first < segment->numel;) {
        uint32_t left = segment->numel - first,
                 numel = left < GC_PIECE_NUMEL ? left & ~7u : GC_PIECE_NUMEL;
        if (numel == 0) {
            gc_values_encode_span(job, segment, first, left);
            return;
        }
        __m256i absmax;
        uint8_t *values = job->payload + segment->codes + size * first;
        GC_BY_DTYPE(job->dtype,
                    absmax = encode_span(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_F32),
                    absmax = encode_span(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_BF16),
                    absmax = encode_span(job->src, segment->data + first, numel, job->value_dtype,
                                         values, GC_F16));
        if (gc_max8(absmax) >= gc_overflow_bits(job->value_dtype))
            gc_values_encode_span(job, segment, first, numel);
        first += numel;
    }
}

/* ---- decode ---------------------------------------------------------------------------------- */
GC_AVX2_INLINE void add_values(const uint8_t *values, uint32_t numel, int starts, float *stage,
                               int dtype)
{
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 x = dtype == GC_F32 ? gc_load8(values + 4 * (size_t)i, GC_F32, 0)
                                   : gc_load8(values + 2 * (size_t)i, GC_BF16, 0);
        _mm256_storeu_ps(stage + i, starts ? x : _mm256_add_ps(_mm256_loadu_ps(stage + i), x));
    }
}

GC_AVX2 static int decode_piece(gc_decode_job *job, const gc_segment *segment,
                                const gc_piece *piece)
{
    float stage[GC_STAGE_NUMEL];
    for (size_t p = 0; p < job->payload_count; p++) {
        const uint8_t *values = job->payloads[p] + segment->codes;
        if (job->value_dtype == GC_F32)
            add_values(values + 4 * (size_t)piece->first, piece->numel, p == 0, stage, GC_F32);
        else
            add_values(values + 2 * (size_t)piece->first, piece->numel, p == 0, stage, GC_BF16);
    }
    return gc_store_stage(job, segment, piece, stage, 1.0f / (float)job->payload_count);
}

void gc_values_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_values_decode_span);
}
#endif
