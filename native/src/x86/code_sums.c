/* code_sums.c - integer sums of ternary codes, a byte an element, and their compaction to lanes of
 * up to 8 bits.
 *
 * Two codes of every byte are added in its two nibbles, so that one addition adds 64 codes. A
 * nibble holds five codes even when all are `11`; then the nibbles are added to bytes.
 */
#include "internal.h"

#if defined(__x86_64__)
#include "common.h"
#include "lanes.h"

enum { BLOCK_NBYTES = GC_SUMS_BLOCK_NUMEL / 4, NIBBLE_PAYLOADS = 5 };

/* Byte j of sums[k] sums the codes in bits 2k, 2k + 1 of byte j. */
GC_AVX2_INLINE void add_nibbles(__m256i sums[4], __m256i even, __m256i odd)
{
    const __m256i nibble = _mm256_set1_epi8(0x0F);
    sums[0] = _mm256_add_epi8(sums[0], _mm256_and_si256(even, nibble));
    sums[1] = _mm256_add_epi8(sums[1], _mm256_and_si256(odd, nibble));
    sums[2] = _mm256_add_epi8(sums[2], _mm256_and_si256(_mm256_srli_epi16(even, 4), nibble));
    sums[3] = _mm256_add_epi8(sums[3], _mm256_and_si256(_mm256_srli_epi16(odd, 4), nibble));
}

/* Store the sums in the order of the elements. */
GC_AVX2_INLINE void store_sums(uint8_t *out, const __m256i sums[4])
{
    __m256i lo01 = _mm256_unpacklo_epi8(sums[0], sums[1]),
            hi01 = _mm256_unpackhi_epi8(sums[0], sums[1]);
    __m256i lo23 = _mm256_unpacklo_epi8(sums[2], sums[3]),
            hi23 = _mm256_unpackhi_epi8(sums[2], sums[3]);
    __m256i a = _mm256_unpacklo_epi16(lo01, lo23), b = _mm256_unpackhi_epi16(lo01, lo23);
    __m256i c = _mm256_unpacklo_epi16(hi01, hi23), d = _mm256_unpackhi_epi16(hi01, hi23);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(c, d, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 64), _mm256_permute2x128_si256(a, b, 0x31));
    _mm256_storeu_si256((__m256i *)(out + 96), _mm256_permute2x128_si256(c, d, 0x31));
}

/* One block of 32 code bytes at `offset` of every payload, of which `available` may be read. */
GC_AVX2_INLINE void sum_block(const gc_decode_job *job, size_t offset, size_t available,
                              uint8_t *out)
{
    const __m256i pairs = _mm256_set1_epi8(0x33);
    __m256i zero = _mm256_setzero_si256(), sums[4] = {zero, zero, zero, zero};
    uint8_t rest[BLOCK_NBYTES] = {0};
    for (size_t p = 0; p < job->payload_count;) {
        __m256i even = zero, odd = zero;
        size_t end = job->payload_count - p < NIBBLE_PAYLOADS ? job->payload_count
                                                              : p + NIBBLE_PAYLOADS;
        for (; p < end; p++) {
            const uint8_t *codes = job->payloads[p] + offset;
            if (available < BLOCK_NBYTES)
                codes = memcpy(rest, codes, available);
            __m256i c = _mm256_loadu_si256((const __m256i *)codes);
            even = _mm256_add_epi8(even, _mm256_and_si256(c, pairs));
            odd = _mm256_add_epi8(odd, _mm256_and_si256(_mm256_srli_epi16(c, 2), pairs));
        }
        add_nibbles(sums, even, odd);
    }
    store_sums(out, sums);
}

GC_AVX2 void gc_byte_sums(const gc_decode_job *job, const gc_segment *segment, size_t first_byte,
                          uint32_t numel, uint8_t *sums)
{
    size_t total = gc_code_nbytes(segment->numel, 2);
    for (uint32_t i = 0; i < numel; i += GC_SUMS_BLOCK_NUMEL) {
        size_t byte = first_byte + i / 4;
        sum_block(job, segment->codes + byte, total - byte, sums + i);
    }
}

/* Move eight lanes of `bits` <= 8 bits, a byte each, together: pairs, then fours, then eights. */
GC_AVX2_INLINE __m256i compact8(__m256i x, int bits)
{
    const __m128i by8 = _mm_cvtsi32_si128(8 - bits), by16 = _mm_cvtsi32_si128(16 - 2 * bits),
                  by32 = _mm_cvtsi32_si128(32 - 4 * bits);
    const __m256i low8 = _mm256_set1_epi16(0x00FF), low16 = _mm256_set1_epi32(0x0000FFFF),
                  low32 = _mm256_set1_epi64x(0xFFFFFFFF);
    x = _mm256_or_si256(_mm256_and_si256(x, low8),
                        _mm256_srl_epi64(_mm256_andnot_si256(low8, x), by8));
    x = _mm256_or_si256(_mm256_and_si256(x, low16),
                        _mm256_srl_epi64(_mm256_andnot_si256(low16, x), by16));
    return _mm256_or_si256(_mm256_and_si256(x, low32),
                           _mm256_srl_epi64(_mm256_andnot_si256(low32, x), by32));
}

/* Pack `numel` sums, rounded up to 32, to lanes; writes up to seven bytes after them. */
GC_AVX2 static void pack_lanes(const uint8_t *sums, uint32_t numel, unsigned bits, uint8_t *lanes)
{
    const __m256i mask = _mm256_set1_epi8((char)((1u << bits) - 1));
    for (uint32_t i = 0; i < numel; i += 32) {
        __m256i x = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(sums + i)), mask);
        uint64_t eights[4];
        _mm256_storeu_si256((__m256i *)eights, compact8(x, (int)bits));
        for (int j = 0; j < 4; j++, lanes += bits)
            memcpy(lanes, &eights[j], 8);
    }
}

GC_AVX2 void gc_sum_lanes_avx2(const gc_decode_job *job, const gc_segment *in,
                               const gc_segment *out, uint8_t *lanes)
{
    if (job->lane_bits > 8) {
        gc_sum_lanes_span(job, in, out, lanes, 0, in->numel);
        return;
    }
    uint8_t sums[GC_PIECE_NUMEL], packed[GC_PIECE_NUMEL + 8];
    for (uint32_t first = 0; first < in->numel; first += GC_PIECE_NUMEL) {
        uint32_t left = in->numel - first, numel = left < GC_PIECE_NUMEL ? left : GC_PIECE_NUMEL;
        gc_byte_sums(job, in, first / 4, numel, sums);
        /* Lanes of elements that do not exist would be padding other than 0. */
        memset(sums + numel, 0, (GC_PIECE_NUMEL - numel) % GC_SUMS_BLOCK_NUMEL);
        pack_lanes(sums, numel, job->lane_bits, packed);
        memcpy(lanes + out->codes + (size_t)first * job->lane_bits / 8, packed,
               gc_code_nbytes(numel, job->lane_bits));
    }
}
#endif
