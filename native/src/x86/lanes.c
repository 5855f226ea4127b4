/* lanes.c - exact integer lanes of any width: eight lanes lie in at most sixteen bytes, one shuffle
 * brings to each 32-bit lane the three bytes that hold its bits, and one shift moves them down. */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "lanes.h"

typedef struct {
    __m256i bytes, shifts, mask;
} lane_plan;

/* How eight lanes are found that start `phase` bits after the beginning of a byte. */
GC_AVX2_INLINE lane_plan plan_lanes(unsigned phase, unsigned bits)
{
    int8_t bytes[32];
    uint32_t shifts[8];
    for (unsigned l = 0; l < 8; l++) {
        unsigned bit = phase + l * bits;
        shifts[l] = bit % 8;
        /* a negative index gives 0: the fourth byte, and bytes after the last bit */
        for (unsigned j = 0; j < 4; j++) {
            int is_wanted = j < 3 && 8 * (bit / 8 + j) < bit + bits;
            bytes[4 * l + j] = is_wanted ? (int8_t)(bit / 8 + j) : -1;
        }
    }
    lane_plan plan = {_mm256_loadu_si256((const __m256i *)bytes),
                      _mm256_loadu_si256((const __m256i *)shifts),
                      _mm256_set1_epi32((int)((1u << bits) - 1))};
    return plan;
}

/* Eight lanes from sixteen readable bytes. */
GC_AVX2_INLINE __m256i lanes8(const uint8_t *lanes, const lane_plan *plan)
{
    __m256i window = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)lanes));
    __m256i moved = _mm256_srlv_epi32(_mm256_shuffle_epi8(window, plan->bytes), plan->shifts);
    return _mm256_and_si256(moved, plan->mask);
}

GC_AVX2 static int decode_piece(gc_decode_job *job, const gc_segment *segment,
                                const gc_piece *piece)
{
    uint8_t padded[GC_PADDED_NBYTES];
    float stage[GC_STAGE_NUMEL], scales[GC_STAGE_NUMEL];
    unsigned bits = job->lane_bits;
    const uint8_t *lanes = gc_padded_codes(job->payloads[0], segment, piece, bits, padded);
    const lane_plan plan = plan_lanes((unsigned)((uint64_t)piece->first * bits % 8), bits);
    const __m256i world_size = _mm256_set1_epi32((int)job->world_size);
    const __m256 divisor = _mm256_set1_ps((float)job->world_size);
    if (!piece->is_uniform)
        gc_fill_scales(job->payloads[0], segment, piece, 1, 0, scales);
    for (uint32_t i = 0; i < piece->numel; i += 8, lanes += bits) {
        __m256 k = _mm256_cvtepi32_ps(_mm256_sub_epi32(lanes8(lanes, &plan), world_size));
        if (!piece->is_uniform)
            k = _mm256_mul_ps(k, _mm256_div_ps(_mm256_loadu_ps(scales + i), divisor));
        _mm256_storeu_ps(stage + i, k);
    }
    float scale = gc_scale(job->payloads[0], segment, piece->run.group);
    return gc_store_stage(job, segment, piece, stage,
                          piece->is_uniform ? scale / (float)job->world_size : 1.0f);
}

void gc_lanes_decode_avx2(gc_decode_job *job, const gc_segment *segment)
{
    gc_decode_pieces(job, segment, decode_piece, gc_lanes_decode_span);
}

GC_AVX2 gc_status gc_lanes_validate_avx2(const uint8_t *lanes, uint32_t numel, uint32_t world_size,
                                         unsigned lane_bits)
{
    size_t nbytes = gc_code_nbytes(numel, lane_bits);
    const lane_plan plan = plan_lanes(0, lane_bits);
    __m256i largest = _mm256_setzero_si256();
    uint32_t i = 0;
    for (; i + 8 <= numel && (size_t)i / 8 * lane_bits + 16 <= nbytes; i += 8)
        largest = _mm256_max_epi32(largest, lanes8(lanes + (size_t)i / 8 * lane_bits, &plan));
    if (gc_max8(largest) > 2 * world_size)
        return GC_LANE_RANGE;
    return gc_lanes_validate_portable(lanes + (size_t)i / 8 * lane_bits, numel - i, world_size,
                                      lane_bits);
}
#endif
