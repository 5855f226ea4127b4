/* statistics.c - block sums: sixteen float64 lanes are four vectors for the sums and four for the
 * squares. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"

enum { PREFETCH_NUMEL = 512 };

typedef struct {
    __m256d sums[4], squares[4]; /* lanes 4j .. 4j + 3 in vector j */
    __m256i absmax;
} block_lanes;

GC_AVX2_INLINE void add4(block_lanes *lanes, int j, __m128 x)
{
    __m256d d = _mm256_cvtps_pd(x);
    lanes->sums[j] = _mm256_add_pd(lanes->sums[j], d);
    /* the product is exact: fused or not is the same */
    lanes->squares[j] = _mm256_fmadd_pd(d, d, lanes->squares[j]);
}

GC_AVX2_INLINE void add16(block_lanes *lanes, __m256 a, __m256 b)
{
    add4(lanes, 0, _mm256_castps256_ps128(a));
    add4(lanes, 1, _mm256_extractf128_ps(a, 1));
    add4(lanes, 2, _mm256_castps256_ps128(b));
    add4(lanes, 3, _mm256_extractf128_ps(b, 1));
    lanes->absmax = _mm256_max_epi32(lanes->absmax, _mm256_max_epi32(gc_abs8(a), gc_abs8(b)));
}

GC_AVX2_INLINE gc_block sum_one_block(const void *src, uint64_t first, uint32_t numel, int dtype)
{
    block_lanes lanes;
    for (int j = 0; j < 4; j++)
        lanes.sums[j] = lanes.squares[j] = _mm256_setzero_pd();
    lanes.absmax = _mm256_setzero_si256();
    uint32_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        gc_prefetch(src, dtype, first + i + PREFETCH_NUMEL);
        add16(&lanes, gc_load8(src, dtype, first + i), gc_load8(src, dtype, first + i + 8));
    }
    if (i < numel) { /* adding +0.0 changes no lane: none is ever -0.0 */
        float rest[16] = {0};
        for (uint32_t j = 0; i + j < numel; j++)
            rest[j] = gc_load(src, dtype, first + i + j);
        add16(&lanes, _mm256_loadu_ps(rest), _mm256_loadu_ps(rest + 8));
    }
    gc_block block = {gc_total16(lanes.sums), gc_total16(lanes.squares), gc_max8(lanes.absmax), 0};
    return block;
}

GC_AVX2_INLINE void sum_blocks(gc_encode_job *job, const gc_segment *segment, int dtype)
{
    gc_block *block = job->blocks + segment->block;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        for (uint32_t j = 0; j < run.numel; j += GC_BLOCK_NUMEL, block++) {
            uint32_t numel = run.numel - j < GC_BLOCK_NUMEL ? run.numel - j : GC_BLOCK_NUMEL;
            *block = sum_one_block(job->src, segment->data + i + j, numel, dtype);
            if (block->absmax_bits >= GC_INF_BITS) {
                *block = gc_block_of(job->src, dtype, segment->data + i + j, numel);
                job->nonfinite = 1;
            }
        }
        i += run.numel;
    }
}

GC_AVX2 void gc_block_sums_avx2(gc_encode_job *job, const gc_segment *segment)
{
    GC_BY_DTYPE(job->dtype, sum_blocks(job, segment, GC_F32), sum_blocks(job, segment, GC_BF16),
                sum_blocks(job, segment, GC_F16));
}
#endif
