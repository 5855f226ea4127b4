/* ternary_encode512.c - ternary codes of two superblocks at a time: 128 elements, sixteen Philox
 * blocks.
 *
 * The blocks are two vectors of eight 64-bit lanes, even and odd ones, of which only the low halves
 * count. Words of 16 elements of both superblocks, one after the other, are decided together; their
 * decisions are masks, and depositing bits makes the codes of them.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common512.h"
#include "superblocks.h"

enum { PREFETCH_NUMEL = 1024, WORDS = 4, XOR3 = 0x96 };
#define MAX_THRESHOLD 0x1p30f /* a product of floats may be a little off */

/* ---- random numbers -------------------------------------------------------------------------- */
GC_AVX512_INLINE __m512i every(uint32_t x) { return _mm512_set1_epi32((int)x); }
GC_AVX512_INLINE __m512i high(__m512i product)
{
    return _mm512_shuffle_epi32(product, _MM_PERM_DDBB);
}
GC_AVX512_INLINE __m512i xor3(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi32(a, b, c, XOR3);
}

/* The 128 draws of two superblocks: the lower half of word w holds those of the first one's
 * elements 16w to 16w + 15, the upper half the second one's, in the order of the elements. */
GC_AVX512_INLINE void draw128(const gc_philox_plan *plan, uint32_t superblock, __m512i draws[WORDS])
{
    static const uint16_t order[32] = {/* a 32-bit lane has the draws of elements l and 8 + l */
                                       0,  2,  4,  6,  8,  10, 12, 14, 1,  3,  5,
                                       7,  9,  11, 13, 15, 16, 18, 20, 22, 24, 26,
                                       28, 30, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i m0 = every(GC_PHILOX_M0), m1 = every(GC_PHILOX_M1);
    __m512i first = _mm512_set1_epi64((long long)superblock * 8), p0[2], p1[2], c[2][WORDS];
    p0[0] = _mm512_mul_epu32(_mm512_add_epi64(first, _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14)),
                             m0);
    p0[1] = _mm512_mul_epu32(_mm512_add_epi64(first, _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15)),
                             m0);
    for (int v = 0; v < 2; v++) {
        p1[v] = _mm512_mul_epu32(_mm512_xor_si512(high(p0[v]), every(plan->round1_c2)), m1);
        c[v][0] = _mm512_xor_si512(high(p1[v]), every(plan->round2_c0));
        c[v][1] = p1[v];
        c[v][2] = _mm512_xor_si512(p0[v], every(plan->round2_c2));
    }
    for (int v = 0; v < 2; v++) {
        p0[v] = _mm512_mul_epu32(c[v][0], m0);
        p1[v] = _mm512_mul_epu32(c[v][2], m1);
        c[v][0] = xor3(c[v][1], every(plan->key0[2]), high(p1[v]));
        c[v][1] = p1[v];
        c[v][2] = _mm512_xor_si512(high(p0[v]), every(plan->round3_c2));
        c[v][3] = p0[v];
    }
    for (int r = 3; r < GC_PHILOX_ROUNDS; r++)
        for (int v = 0; v < 2; v++) {
            p0[v] = _mm512_mul_epu32(c[v][0], m0);
            p1[v] = _mm512_mul_epu32(c[v][2], m1);
            c[v][0] = xor3(c[v][1], every(plan->key0[r]), high(p1[v]));
            c[v][1] = p1[v];
            c[v][2] = xor3(c[v][3], every(plan->key1[r]), high(p0[v]));
            c[v][3] = p0[v];
        }
    for (int w = 0; w < WORDS; w++) { /* odd blocks into the upper halves of the even ones' lanes */
        __m512i woven = _mm512_mask_shuffle_epi32(c[0][w], 0xAAAA, c[1][w], _MM_PERM_CCAA);
        draws[w] = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), woven);
    }
}

/* ---- decisions ------------------------------------------------------------------------------- */
/* 1 + |x| / S * 65536, rounded down; negative where that is NaN or at least 2^31. A product with
 * 65536 / S instead of the quotient may be off by one, which GC_OPEN_DISTANCE allows for. */
GC_AVX512_INLINE __m512i threshold16(__m512 x, __m512 factor, int is_bounded, __m512i *absmax)
{
    __m512i a = gc_abs16(x);
    *absmax = _mm512_max_epu32(*absmax, a);
    __m512 t = _mm512_fmadd_ps(_mm512_castsi512_ps(a), factor, _mm512_set1_ps(1.0f));
    if (!is_bounded)
        t = _mm512_min_ps(_mm512_set1_ps(65536.0f), t); /* NaN: min returns its second */
    return _mm512_cvttps_epi32(t);
}

/* Codes of sixteen elements a and sixteen elements b, those of a in the low half; *distance
 * receives u in their order. */
GC_AVX512_INLINE uint64_t codes32(__m512 a, __m512 b, __m512i ta, __m512i tb, __m512i draws,
                                  __m512i *distance)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    /* saturates to 0 and 65535 */
    __m512i t = _mm512_permutexvar_epi64(order, _mm512_packus_epi32(ta, tb));
    __mmask32 nonzero = _mm512_cmplt_epu16_mask(draws, t);
    __mmask32 negative = _mm512_kunpackw(_mm512_movepi32_mask(_mm512_castps_si512(b)),
                                         _mm512_movepi32_mask(_mm512_castps_si512(a)));
    *distance = _mm512_sub_epi16(t, draws);
    uint32_t low = ~(uint32_t)nonzero, top = (uint32_t)nonzero & ~(uint32_t)negative;
    return _pdep_u64(low, 0x5555555555555555u) | _pdep_u64(top, 0xAAAAAAAAAAAAAAAAu);
}

/* ---- superblocks ----------------------------------------------------------------------------- */
/* `distances` are those of superblocks at `position` in their lower halves, and at position + 64 in
 * their upper ones. */
static __attribute__((noinline)) GC_AVX512 void recheck(const gc_encode_job *job,
                                                        const gc_segment *segment,
                                                        uint32_t position,
                                                        const __m512i distances[WORDS], int count)
{
    uint16_t distance[2][GC_SUPERBLOCK_NUMEL];
    for (int w = 0; w < WORDS; w++) {
        _mm256_storeu_si256((__m256i *)(distance[0] + 16 * w),
                            _mm512_castsi512_si256(distances[w]));
        _mm256_storeu_si256((__m256i *)(distance[1] + 16 * w),
                            _mm512_extracti64x4_epi64(distances[w], 1));
    }
    for (int s = 0; s < count; s++)
        gc_recheck_superblock(job, segment, position + (uint32_t)s * GC_SUPERBLOCK_NUMEL,
                              distance[s]);
}

/* Encode `count` superblocks, one or two. */
GC_AVX512_INLINE void encode_pair(gc_encode_job *job, const gc_segment *segment,
                                  const gc_philox_plan *plan, uint32_t position, int count,
                                  const float *factors, int is_uniform, int dtype, __m512i *absmax)
{
    uint8_t *codes = job->payload + segment->codes + position / 4;
    uint64_t at = segment->data + position;
    __m512i draws[WORDS], distances[WORDS], least = _mm512_set1_epi16(-1);
    draw128(plan, (segment->start + position) / GC_SUPERBLOCK_NUMEL, draws);
    for (int w = 0; w < WORDS; w++) {
        __m512 factor = is_uniform ? _mm512_set1_ps(*factors) : _mm512_loadu_ps(factors + 16 * w);
        __m512 a = gc_load16(job->src, dtype, at + 16 * w), b = _mm512_setzero_ps();
        gc_prefetch(job->src, dtype, at + 16 * w + PREFETCH_NUMEL);
        __m512i ta = threshold16(a, factor, is_uniform, absmax), tb = _mm512_set1_epi32(65535);
        if (count == 2) {
            b = gc_load16(job->src, dtype, at + 16 * w + GC_SUPERBLOCK_NUMEL);
            gc_prefetch(job->src, dtype, at + 16 * w + GC_SUPERBLOCK_NUMEL + PREFETCH_NUMEL);
            tb = threshold16(b, factor, is_uniform, absmax);
        }
        uint64_t pair = codes32(a, b, ta, tb, draws[w], &distances[w]);
        uint32_t first = (uint32_t)pair, second = (uint32_t)(pair >> 32);
        memcpy(codes + 4 * w, &first, 4);
        if (count == 2)
            memcpy(codes + 16 + 4 * w, &second, 4);
        least = _mm512_min_epu16(least, distances[w]);
    }
    if (_mm512_cmple_epu16_mask(least, _mm512_set1_epi16(GC_OPEN_DISTANCE)))
        recheck(job, segment, position, distances, count);
}

GC_AVX512_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment,
                                  const gc_philox_plan *plan, const gc_superblocks *blocks,
                                  int is_uniform, int dtype)
{
    const float *factors = blocks->factors;
    __m512i absmax = _mm512_setzero_si512();
    uint32_t position = blocks->first, count = blocks->count;
    for (; is_uniform && count >= 2; count -= 2, position += 2 * GC_SUPERBLOCK_NUMEL)
        encode_pair(job, segment, plan, position, 2, factors, is_uniform, dtype, &absmax);
    if (count)
        encode_pair(job, segment, plan, position, 1, factors, is_uniform, dtype, &absmax);
    uint32_t largest = _mm512_reduce_max_epu32(absmax);
    job->nonfinite |= largest >= GC_INF_BITS;
    /* thresholds that have passed 2^31 have become 0; NaN does not compare */
    if (is_uniform && *factors > 0 && !(gc_float_of(largest) * *factors < MAX_THRESHOLD))
        gc_ternary_encode_span(job, segment, blocks->first, blocks->count * GC_SUPERBLOCK_NUMEL);
}

GC_AVX512 static void encode_superblocks(gc_encode_job *job, const gc_segment *segment,
                                         const gc_philox_plan *plan, const gc_superblocks *blocks)
{
    if (blocks->is_uniform)
        GC_BY_DTYPE(job->dtype, encode_body(job, segment, plan, blocks, 1, GC_F32),
                    encode_body(job, segment, plan, blocks, 1, GC_BF16),
                    encode_body(job, segment, plan, blocks, 1, GC_F16));
    else
        GC_BY_DTYPE(job->dtype, encode_body(job, segment, plan, blocks, 0, GC_F32),
                    encode_body(job, segment, plan, blocks, 0, GC_BF16),
                    encode_body(job, segment, plan, blocks, 0, GC_F16));
}

void gc_ternary_encode_avx512(gc_encode_job *job, const gc_segment *segment)
{
    gc_encode_superblocks(job, segment, encode_superblocks);
}
#endif
