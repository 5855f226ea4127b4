/* store.c - decoded values from their stage to the output. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

GC_AVX2_INLINE __m256i store_body(void *out, uint64_t index, uint32_t numel, const float *stage,
                                  float factor, int dtype, int stream)
{
    __m256 factors = _mm256_set1_ps(factor);
    __m256i absmax = _mm256_setzero_si256();
    for (uint32_t i = 0; i < numel; i += 8) {
        __m256 x = _mm256_mul_ps(_mm256_loadu_ps(stage + i), factors);
        absmax = _mm256_max_epi32(absmax, gc_abs8(x));
        gc_write8(out, dtype, index + i, x, stream);
    }
    return absmax;
}

GC_AVX2 int gc_store_stage(const gc_decode_job *job, const gc_segment *segment,
                           const gc_piece *piece, const float *stage, float factor)
{
    __m256i absmax;
#define STORE(...) absmax = store_body(__VA_ARGS__)
    GC_BY_OUTPUT(job, gc_piece_streams(job, segment, piece), STORE, job->out,
                 segment->data + piece->first, piece->numel, stage, factor);
#undef STORE
    return gc_max8(absmax) < gc_overflow_bits(job->out_dtype);
}
#endif
