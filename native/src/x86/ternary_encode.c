/* ternary_encode.c - ternary codes of whole superblocks: 64 elements, eight Philox blocks, sixteen
 * bytes.
 *
 * The eight blocks are two vectors of four 64-bit lanes, of which only the low halves count (the
 * multiplication ignores the high ones). Even and odd blocks are then woven into eight 32-bit
 * lanes; lane l of word w holds the 16-bit draws of elements 16w + l and 16w + 8 + l, which is
 * where the pinned layout comes from. Superblocks in which a draw is too close to its threshold
 * (three in about a thousand) are checked again one by one. The portable encoder writes those that
 * the segment cuts.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "superblocks.h"

enum { PREFETCH_NUMEL = 1024, WORDS = 4 };
#define MAX_THRESHOLD 0x1p30f /* a product of floats may be a little off */

/* ---- random numbers -------------------------------------------------------------------------- */
/* gc_philox_plan in every lane. */
typedef struct {
    __m256i round1_c2, round2_c0, round2_c2, round3_c2, key0[GC_PHILOX_ROUNDS],
        key1[GC_PHILOX_ROUNDS];
} philox_lanes;

GC_AVX2_INLINE philox_lanes spread(const gc_philox_plan *plan)
{
    philox_lanes lanes = {.round1_c2 = _mm256_set1_epi32((int)plan->round1_c2),
                          .round2_c0 = _mm256_set1_epi32((int)plan->round2_c0),
                          .round2_c2 = _mm256_set1_epi32((int)plan->round2_c2),
                          .round3_c2 = _mm256_set1_epi32((int)plan->round3_c2)};
    for (int r = 2; r < GC_PHILOX_ROUNDS; r++) {
        lanes.key0[r] = _mm256_set1_epi32((int)plan->key0[r]);
        lanes.key1[r] = _mm256_set1_epi32((int)plan->key1[r]);
    }
    return lanes;
}

GC_AVX2_INLINE __m256i high(__m256i product) { return _mm256_srli_epi64(product, 32); }
GC_AVX2_INLINE __m256i xor3(__m256i a, __m256i b, __m256i c)
{
    __m256i ab = _mm256_xor_si256(a, b);
    __asm__("" : "+x"(ab)); /* c is ready last: keep the compiler from reordering */
    return _mm256_xor_si256(ab, c);
}

/* Blocks 8 * superblock + b of a superblock, even b in the low halves of c[0], odd b in those of
 * c[1]. Both are worked on side by side, because a round waits longer for its two products than it
 * takes to issue them. */
GC_AVX2_INLINE void philox8(const philox_lanes *plan, uint32_t superblock, __m256i c[2][WORDS])
{
    const __m256i m0 = _mm256_set1_epi32((int)GC_PHILOX_M0),
                  m1 = _mm256_set1_epi32((int)GC_PHILOX_M1);
    __m256i first = _mm256_set1_epi64x((long long)superblock * 8), p0[2], p1[2];
    p0[0] = _mm256_mul_epu32(_mm256_add_epi64(first, _mm256_setr_epi64x(0, 2, 4, 6)), m0);
    p0[1] = _mm256_mul_epu32(_mm256_add_epi64(first, _mm256_setr_epi64x(1, 3, 5, 7)), m0);
    for (int v = 0; v < 2; v++) {
        p1[v] = _mm256_mul_epu32(_mm256_xor_si256(high(p0[v]), plan->round1_c2), m1);
        c[v][0] = _mm256_xor_si256(high(p1[v]), plan->round2_c0);
        c[v][1] = p1[v];
        c[v][2] = _mm256_xor_si256(p0[v], plan->round2_c2);
    }
    for (int v = 0; v < 2; v++) {
        p0[v] = _mm256_mul_epu32(c[v][0], m0);
        p1[v] = _mm256_mul_epu32(c[v][2], m1);
        c[v][0] = xor3(c[v][1], plan->key0[2], high(p1[v]));
        c[v][1] = p1[v];
        c[v][2] = _mm256_xor_si256(high(p0[v]), plan->round3_c2);
        c[v][3] = p0[v];
    }
    for (int r = 3; r < GC_PHILOX_ROUNDS; r++)
        for (int v = 0; v < 2; v++) {
            p0[v] = _mm256_mul_epu32(c[v][0], m0);
            p1[v] = _mm256_mul_epu32(c[v][2], m1);
            c[v][0] = xor3(c[v][1], plan->key0[r], high(p1[v]));
            c[v][1] = p1[v];
            c[v][2] = xor3(c[v][3], plan->key1[r], high(p0[v]));
            c[v][3] = p0[v];
        }
}

/* The 64 draws of a superblock: lane l of word w holds those of elements 16w + l (low half) and 16w
 * + 8 + l. */
GC_AVX2_INLINE void draw64(const philox_lanes *plan, uint32_t superblock, __m256i draws[WORDS])
{
    __m256i c[2][WORDS];
    philox8(plan, superblock, c);
    for (int w = 0; w < WORDS; w++)
        draws[w] = _mm256_blend_epi32(c[0][w], _mm256_slli_epi64(c[1][w], 32), 0xAA);
}

/* ---- decisions ------------------------------------------------------------------------------- */
/* Sixteen elements a (0-7) and b (8-15) become sixteen 16-bit lanes a0-3 b0-3 a4-7 b4-7, which is
 * how packing two vectors lays them. */
typedef struct {
    __m256i absmax;
    __m256i distance; /* least distance u of a superblock */
} watch;

/* 1 + |x| / S * 65536, rounded down; negative where that is NaN or at least 2^31. A product with
 * 65536 / S instead of the quotient may be off by one, which decide16 allows for. */
GC_AVX2_INLINE __m256i threshold8(__m256 x, __m256 factor, int is_bounded, watch *seen)
{
    __m256i a = gc_abs8(x);
    seen->absmax = _mm256_max_epi32(seen->absmax, a);
    __m256 t = _mm256_fmadd_ps(_mm256_castsi256_ps(a), factor, _mm256_set1_ps(1.0f));
    if (!is_bounded)
        t = _mm256_min_ps(_mm256_set1_ps(65536.0f), t); /* NaN: min returns its second */
    return _mm256_cvttps_epi32(t);
}

typedef struct {
    __m256i is_zero, sign; /* masks of 16 bits; sign in the top bit */
    __m256i distance;      /* u */
} decisions;

/* See GC_OPEN_DISTANCE. Packing saturates: thresholds to 0 and 65535, the sign of x stays. */
GC_AVX2_INLINE decisions decide16(__m256 a, __m256 b, __m256 factor_a, __m256 factor_b,
                                  int is_bounded, __m256i draws, watch *seen)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i t = _mm256_packus_epi32(threshold8(a, factor_a, is_bounded, seen),
                                    threshold8(b, factor_b, is_bounded, seen));
    __m256i r = _mm256_shuffle_epi8(draws, order);
    decisions d;
    d.distance = _mm256_sub_epi16(t, r);
    seen->distance = _mm256_min_epu16(seen->distance, d.distance);
    d.is_zero = _mm256_cmpeq_epi16(_mm256_max_epu16(t, r), r); /* not r < t */
    d.sign = _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
    return d;
}

GC_AVX2_INLINE int has_open(const watch *seen)
{
    __m256i open = _mm256_cmpeq_epi16(
        _mm256_min_epu16(seen->distance, _mm256_set1_epi16(GC_OPEN_DISTANCE)), seen->distance);
    return !_mm256_testz_si256(open, open);
}

/* Codes of two words in bytes: a0-3 b0-3 of v and of w in the low half, a4-7 b4-7 in the high
 * one. */
GC_AVX2_INLINE __m256i codes32(decisions v, decisions w)
{
    __m256i is_zero = _mm256_packs_epi16(v.is_zero, w.is_zero),
            sign = _mm256_packs_epi16(v.sign, w.sign);
    __m256i nonzero = _mm256_blendv_epi8(_mm256_set1_epi8(2), _mm256_setzero_si256(), sign);
    return _mm256_blendv_epi8(nonzero, _mm256_set1_epi8(1), is_zero);
}

/* Four codes, a byte each, in the low byte of a 32-bit lane. */
GC_AVX2_INLINE __m256i fours(__m256i codes)
{
    __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(4 << 8 | 1));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(16 << 16 | 1));
}

/* Pack the codes of 64 elements: words 0 and 1 in `low`, 2 and 3 in `high_words`. */
GC_AVX2_INLINE __m128i pack64(__m256i low, __m256i high_words)
{
    /* 0-3 and 8-11 of each word, then 4-7 and 12-15 */
    __m256i bytes = _mm256_packus_epi32(fours(low), fours(high_words));
    return _mm_or_si128(_mm256_castsi256_si128(bytes),
                        _mm_slli_epi16(_mm256_extracti128_si256(bytes, 1), 8));
}

/* ---- superblocks ----------------------------------------------------------------------------- */
/* Decisions lie as decide16 leaves them: a0-3 b0-3 a4-7 b4-7 of every word. */
static __attribute__((noinline)) GC_AVX2 void recheck(const gc_encode_job *job,
                                                      const gc_segment *segment, uint32_t position,
                                                      const __m256i distances[WORDS])
{
    uint16_t packed[GC_SUPERBLOCK_NUMEL], distance[GC_SUPERBLOCK_NUMEL];
    memcpy(packed, distances, sizeof packed);
    for (uint32_t k = 0; k < GC_SUPERBLOCK_NUMEL; k++)
        distance[k / 16 * 16 + k % 8 / 4 * 8 + k % 16 / 8 * 4 + k % 4] = packed[k];
    gc_recheck_superblock(job, segment, position, distance);
}

GC_AVX2_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment,
                                const gc_philox_plan *plan, const gc_superblocks *blocks,
                                int is_uniform, int dtype)
{
    uint8_t *codes = job->payload + segment->codes;
    const philox_lanes lanes = spread(plan);
    const float *factors = blocks->factors;
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    uint32_t position = blocks->first;
    for (uint32_t count = blocks->count; count; count--, position += GC_SUPERBLOCK_NUMEL) {
        uint64_t at = segment->data + position;
        __m256i draws[WORDS];
        decisions d[WORDS];
        draw64(&lanes, (segment->start + position) / GC_SUPERBLOCK_NUMEL, draws);
        seen.distance = _mm256_set1_epi16(-1);
        for (int w = 0; w < WORDS; w++) {
            const float *f = is_uniform ? factors : factors + 16 * w;
            __m256 fa = is_uniform ? _mm256_set1_ps(*f) : _mm256_loadu_ps(f);
            __m256 fb = is_uniform ? fa : _mm256_loadu_ps(f + 8);
            gc_prefetch(job->src, dtype, at + 16 * w + PREFETCH_NUMEL);
            d[w] = decide16(gc_load8(job->src, dtype, at + 16 * w),
                            gc_load8(job->src, dtype, at + 16 * w + 8), fa, fb, is_uniform,
                            draws[w], &seen);
        }
        _mm_storeu_si128((__m128i *)(codes + position / 4),
                         pack64(codes32(d[0], d[1]), codes32(d[2], d[3])));
        if (has_open(&seen)) {
            const __m256i distances[WORDS] = {d[0].distance, d[1].distance, d[2].distance,
                                              d[3].distance};
            recheck(job, segment, position, distances);
        }
    }
    uint32_t absmax = gc_max8(seen.absmax);
    job->nonfinite |= absmax >= GC_INF_BITS;
    /* thresholds that have passed 2^31 have become 0; NaN does not compare */
    if (is_uniform && *factors > 0 && !(gc_float_of(absmax) * *factors < MAX_THRESHOLD))
        gc_ternary_encode_span(job, segment, blocks->first, position - blocks->first);
}

GC_AVX2 static void encode_superblocks(gc_encode_job *job, const gc_segment *segment,
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

void gc_ternary_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    gc_encode_superblocks(job, segment, encode_superblocks);
}
#endif
