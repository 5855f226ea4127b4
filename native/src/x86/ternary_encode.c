/* ternary_encode.c - ternary codes of whole superblocks: 64 elements, eight Philox blocks, sixteen bytes.
 *
 * The eight blocks are two vectors of four 64-bit lanes, of which only the low halves count (the multiplication ignores
 * the high ones). Even and odd blocks are then woven into eight 32-bit lanes; lane l of word w holds the 16-bit draws
 * of elements 16w + l and 16w + 8 + l, which is where the pinned layout comes from. Superblocks in which a draw is too
 * close to its threshold (three in about a thousand) are settled one by one, and those cut by the segment are left to
 * the portable encoder.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "philox.h"

enum { SUPERBLOCK_NUMEL = 64, PREFETCH_NUMEL = 1024, WORDS = 4 };
#define MAX_THRESHOLD 0x1p30f /* a product of floats may be a little off */

/* ---- random numbers ---------------------------------------------------------------------------------------------- */
/* Philox with what is constant worked out: three of four counter words are, so the first two rounds need one product
 * each, and the third round one exclusive or less. */
typedef struct {
    __m256i round1_c2;           /* c3 ^ k1 of round 1 */
    __m256i round2_c0, round2_c2;
    __m256i round3_c2;
    __m256i key0[GC_PHILOX_ROUNDS], key1[GC_PHILOX_ROUNDS];
} philox_plan;

GC_AVX2_INLINE philox_plan plan_philox(uint32_t parameter, const gc_rng_key *key)
{
    philox_plan plan;
    uint32_t k0[GC_PHILOX_ROUNDS], k1[GC_PHILOX_ROUNDS];
    for (uint32_t r = 0; r < GC_PHILOX_ROUNDS; r++) {
        k0[r] = key->seed + r * GC_PHILOX_W0;
        k1[r] = key->rank + r * GC_PHILOX_W1;
        plan.key0[r] = _mm256_set1_epi32((int)k0[r]);
        plan.key1[r] = _mm256_set1_epi32((int)k1[r]);
    }
    uint64_t p1 = (uint64_t)GC_PHILOX_M1 * key->step;                             /* round 1: c2 = step */
    uint64_t p0 = (uint64_t)GC_PHILOX_M0 * ((uint32_t)(p1 >> 32) ^ parameter ^ k0[0]); /* round 2: its c0 */
    plan.round1_c2 = _mm256_set1_epi32((int)(key->stream ^ k1[0]));
    plan.round2_c0 = _mm256_set1_epi32((int)((uint32_t)p1 ^ k0[1]));
    plan.round2_c2 = _mm256_set1_epi32((int)((uint32_t)(p0 >> 32) ^ k1[1]));
    plan.round3_c2 = _mm256_set1_epi32((int)((uint32_t)p0 ^ k1[2]));
    return plan;
}

GC_AVX2_INLINE __m256i high(__m256i product) { return _mm256_srli_epi64(product, 32); }
GC_AVX2_INLINE __m256i xor3(__m256i a, __m256i b, __m256i c)
{
    __m256i ab = _mm256_xor_si256(a, b);
    __asm__("" : "+x"(ab)); /* c is ready last: keep the compiler from reordering */
    return _mm256_xor_si256(ab, c);
}

/* Blocks 8 * superblock + b of a superblock, even b in the low halves of c[0], odd b in those of c[1]. Both are worked
 * on side by side, because a round waits longer for its two products than it takes to issue them. */
GC_AVX2_INLINE void philox8(const philox_plan *plan, uint32_t superblock, __m256i c[2][WORDS])
{
    const __m256i m0 = _mm256_set1_epi32((int)GC_PHILOX_M0), m1 = _mm256_set1_epi32((int)GC_PHILOX_M1);
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

/* The 64 draws of a superblock: lane l of word w holds those of elements 16w + l (low half) and 16w + 8 + l. */
GC_AVX2_INLINE void draw64(const philox_plan *plan, uint32_t superblock, __m256i draws[WORDS])
{
    __m256i c[2][WORDS];
    philox8(plan, superblock, c);
    for (int w = 0; w < WORDS; w++)
        draws[w] = _mm256_blend_epi32(c[0][w], _mm256_slli_epi64(c[1][w], 32), 0xAA);
}

/* ---- decisions --------------------------------------------------------------------------------------------------- */
/* Sixteen elements a (0-7) and b (8-15) become sixteen 16-bit lanes a0-3 b0-3 a4-7 b4-7, which is how packing two vectors
 * lays them. */
typedef struct {
    __m256i absmax;
    __m256i distance; /* least distance u of a superblock */
} watch;

/* 1 + |x| / S * 65536, rounded down; negative where that is NaN or at least 2^31. A product with 65536 / S instead of the
 * quotient may be off by one, which decide16 allows for. */
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

/* The contract compares the draw r with T and looks deeper when they are equal. Here T + 1, at most 65535, is known within
 * one, so that u = T + 1 - r > 2 means r < T for sure, and u < 0 (a large number without sign) r > T. What is left is left
 * open. Packing saturates: thresholds to 0 and 65535, the sign of x stays. */
GC_AVX2_INLINE decisions decide16(__m256 a, __m256 b, __m256 factor_a, __m256 factor_b, int is_bounded, __m256i draws,
                                  watch *seen)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i t = _mm256_packus_epi32(threshold8(a, factor_a, is_bounded, seen), threshold8(b, factor_b, is_bounded, seen));
    __m256i r = _mm256_shuffle_epi8(draws, order);
    decisions d;
    d.distance = _mm256_sub_epi16(t, r);
    seen->distance = _mm256_min_epu16(seen->distance, d.distance);
    d.is_zero = _mm256_cmpeq_epi16(_mm256_max_epu16(t, r), r); /* not r < t */
    d.sign = _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
    return d;
}

enum { OPEN_DISTANCE = 2 };

GC_AVX2_INLINE int has_open(const watch *seen)
{
    __m256i open = _mm256_cmpeq_epi16(_mm256_min_epu16(seen->distance, _mm256_set1_epi16(OPEN_DISTANCE)),
                                      seen->distance);
    return !_mm256_testz_si256(open, open);
}

/* Codes of two words in bytes: a0-3 b0-3 of v and of w in the low half, a4-7 b4-7 in the high one. */
GC_AVX2_INLINE __m256i codes32(decisions v, decisions w)
{
    __m256i is_zero = _mm256_packs_epi16(v.is_zero, w.is_zero), sign = _mm256_packs_epi16(v.sign, w.sign);
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
    __m256i bytes = _mm256_packus_epi32(fours(low), fours(high_words)); /* 0-3 and 8-11 of each word, then 4-7 and 12-15 */
    return _mm_or_si128(_mm256_castsi256_si128(bytes), _mm_slli_epi16(_mm256_extracti128_si256(bytes, 1), 8));
}

/* ---- superblocks ------------------------------------------------------------------------------------------------- */
/* Settle the open decisions of a superblock, whose codes are written, as the contract words them. */
static __attribute__((noinline)) GC_AVX2 void settle(const gc_encode_job *job, const gc_segment *segment,
                                                     uint32_t position, const __m256i distances[WORDS])
{
    uint16_t distance[SUPERBLOCK_NUMEL];
    memcpy(distance, distances, sizeof distance);
    for (uint32_t k = 0; k < SUPERBLOCK_NUMEL; k++) {
        if (distance[k] > OPEN_DISTANCE)
            continue;
        uint32_t at = position + k / 16 * 16 + k % 8 / 4 * 8 + k % 16 / 8 * 4 + k % 4;
        gc_run run = gc_run_at(segment, at, segment->numel);
        unsigned code = gc_ternary_code(gc_load(job->src, job->dtype, segment->data + at),
                                        gc_scale(job->payload, segment, run.group), segment->start + at,
                                        segment->parameter, &job->key);
        uint8_t *byte = job->payload + segment->codes + at / 4;
        *byte = (uint8_t)((*byte & ~(3u << 2 * (at % 4))) | code << 2 * (at % 4));
    }
}

/* Encode `count` superblocks from position `first` of the segment on, a superblock's first element. `factors` holds
 * one factor for all, or 64. */
GC_AVX2_INLINE void encode_superblocks(gc_encode_job *job, const gc_segment *segment, const philox_plan *plan,
                                       uint32_t first, uint32_t count, const float *factors, int is_uniform, int dtype)
{
    uint8_t *codes = job->payload + segment->codes;
    watch seen = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    uint32_t position = first;
    for (; count; count--, position += SUPERBLOCK_NUMEL) {
        uint64_t at = segment->data + position;
        __m256i draws[WORDS];
        decisions d[WORDS];
        draw64(plan, (segment->start + position) / SUPERBLOCK_NUMEL, draws);
        seen.distance = _mm256_set1_epi16(-1);
        for (int w = 0; w < WORDS; w++) {
            const float *f = is_uniform ? factors : factors + 16 * w;
            __m256 fa = is_uniform ? _mm256_set1_ps(*f) : _mm256_loadu_ps(f);
            __m256 fb = is_uniform ? fa : _mm256_loadu_ps(f + 8);
            gc_prefetch(job->src, dtype, at + 16 * w + PREFETCH_NUMEL);
            d[w] = decide16(gc_load8(job->src, dtype, at + 16 * w), gc_load8(job->src, dtype, at + 16 * w + 8), fa, fb,
                            is_uniform, draws[w], &seen);
        }
        _mm_storeu_si128((__m128i *)(codes + position / 4), pack64(codes32(d[0], d[1]), codes32(d[2], d[3])));
        if (has_open(&seen)) {
            const __m256i distances[WORDS] = {d[0].distance, d[1].distance, d[2].distance, d[3].distance};
            settle(job, segment, position, distances);
        }
    }
    uint32_t absmax = gc_max8(seen.absmax);
    job->nonfinite |= absmax >= GC_INF_BITS;
    /* thresholds that have passed 2^31 have become 0; NaN does not compare */
    if (is_uniform && *factors > 0 && !(gc_float_of(absmax) * *factors < MAX_THRESHOLD))
        gc_ternary_encode_span(job, segment, first, (position - first));
}

/* 65536 / S; 0 for what is no scale, so that every code is 0; Inf when S is too small for this. */
static float factor_of(const gc_encode_job *job, const gc_segment *segment, uint32_t group)
{
    float scale = gc_scale(job->payload, segment, group);
    return scale > 0 ? 65536.0f / scale : 0;
}

/* Factors of the elements of one superblock. Returns whether all are finite. */
static int fill_factors(const gc_encode_job *job, const gc_segment *segment, uint32_t first, float *factors)
{
    float largest = 0;
    for (uint32_t i = 0; i < SUPERBLOCK_NUMEL;) {
        gc_run run = gc_run_at(segment, first + i, first + SUPERBLOCK_NUMEL);
        float factor = factor_of(job, segment, run.group);
        largest = factor > largest ? factor : largest;
        for (uint32_t end = i + run.numel; i < end; i++)
            factors[i] = factor;
    }
    return gc_is_finite(largest);
}

GC_AVX2_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment, const philox_plan *plan, uint32_t first,
                                uint32_t end, int dtype)
{
    float factors[SUPERBLOCK_NUMEL];
    for (uint32_t i = first; i < end;) {
        gc_run run = gc_run_at(segment, i, end);
        uint32_t count = run.numel / SUPERBLOCK_NUMEL;
        int is_uniform = count > 0, is_usable;
        if (is_uniform)
            is_usable = gc_is_finite(factors[0] = factor_of(job, segment, run.group));
        else
            is_usable = fill_factors(job, segment, i, factors), count = 1;
        if (!is_usable)
            gc_ternary_encode_span(job, segment, i, count * SUPERBLOCK_NUMEL);
        else if (is_uniform)
            encode_superblocks(job, segment, plan, i, count, factors, 1, dtype);
        else
            encode_superblocks(job, segment, plan, i, count, factors, 0, dtype);
        i += count * SUPERBLOCK_NUMEL;
    }
}

GC_AVX2 void gc_ternary_encode_avx2(gc_encode_job *job, const gc_segment *segment)
{
    uint32_t head = (SUPERBLOCK_NUMEL - segment->start % SUPERBLOCK_NUMEL) % SUPERBLOCK_NUMEL;
    head = head < segment->numel ? head : segment->numel;
    uint32_t end = head + (segment->numel - head) / SUPERBLOCK_NUMEL * SUPERBLOCK_NUMEL;
    if (head)
        gc_ternary_encode_span(job, segment, 0, head);
    if (head < end) {
        philox_plan plan = plan_philox(segment->parameter, &job->key);
        GC_BY_DTYPE(job->dtype, encode_body(job, segment, &plan, head, end, GC_F32),
                    encode_body(job, segment, &plan, head, end, GC_BF16),
                    encode_body(job, segment, &plan, head, end, GC_F16));
    }
    if (end < segment->numel)
        gc_ternary_encode_span(job, segment, end, segment->numel - end);
}
#endif
