/* topk_decode.c - averages of top-k payloads, and the check of their codes. */
#include "topk.h"

/* The kept positions of one block, strictly increasing and inside of it. */
typedef struct {
    uint32_t count; /* fewer than the block keeps where its gaps are none */
    gc_status status;
    uint16_t at[GC_TOPK_BLOCK_KEPT];
} block_positions;

/* Read gaps from a copy of their bytes with zeros behind, so that whole words may be loaded and
 * every run of ones ends. */
static block_positions read_gaps(const uint8_t *codes, uint32_t numel)
{
    block_positions found = {0, GC_FORBIDDEN_CODE, {0}};
    uint8_t bytes[GC_TOPK_BLOCK_KEPT + 16] = {0};
    uint32_t k = gc_topk_count(numel), end = 8 * k, bit = 0, next = 0;
    const uint32_t most = 56; /* ones of a word that is shifted by up to 7 bits */
    memcpy(bytes, codes, k);
    while (found.count < k) {
        uint32_t quotient = 0, ones;
        do {
            uint64_t word = gc_load_u64(bytes + bit / 8) >> bit % 8;
            ones = (uint32_t)__builtin_ctzll(~word | 1ull << most);
            quotient += ones;
            bit += ones; /* never beyond `end`, where a 0 stands */
        } while (ones == most);
        bit++;
        uint32_t low = gc_load_u16(bytes + bit / 8) >> bit % 8 & (GC_TOPK_DENSITY - 1);
        uint32_t position = next + quotient * GC_TOPK_DENSITY + low;
        bit += GC_TOPK_LOW_BITS;
        if (bit > end || position >= numel)
            return found;
        found.at[found.count++] = (uint16_t)position;
        next = position + 1;
    }
    uint32_t rest = bytes[bit / 8] >> bit % 8; /* bit is at most `end` */
    for (uint32_t i = bit / 8 + 1; i < k; i++)
        rest |= bytes[i];
    found.status = rest ? GC_BAD_PADDING : GC_OK;
    return found;
}

gc_status gc_topk_validate_portable(const uint8_t *codes, uint32_t start, uint32_t numel)
{
    gc_segment segment = {.start = start, .numel = numel};
    for (uint32_t first = 0, left; first < numel; first += left) {
        left = gc_topk_block_left(&segment, first, numel);
        uint32_t k = gc_topk_count(left), used = 2 * (k % 4);
        gc_status status = read_gaps(codes, left).status;
        if (status != GC_OK)
            return status;
        codes += gc_topk_block_nbytes(left);
        if (used && codes[-1] >> used)
            return GC_BAD_PADDING;
    }
    return GC_OK;
}

/* Add the values that one payload gives to elements of one block. */
static void add_payload(const uint8_t *payload, const uint8_t *codes, const gc_segment *segment,
                        uint32_t group, uint32_t numel, float *sums)
{
    float inner = gc_scale(payload, segment, 2 * group),
          outer = gc_scale(payload, segment, 2 * group + 1);
    float values[4] = {inner, 0 - inner, outer, 0 - outer};
    const uint8_t *bits = codes + gc_topk_count(numel);
    block_positions found = read_gaps(codes, numel);
    for (uint32_t j = 0; j < found.count; j++)
        sums[found.at[j]] += values[bits[j / 4] >> 2 * (j % 4) & 3];
}

GC_INLINE void store_body(gc_decode_job *job, int dtype, const gc_segment *segment, uint32_t first,
                          uint32_t numel, const float *sums)
{
    float factor = 1.0f / (float)job->payload_count;
    uint32_t nonfinite = 0;
    for (uint32_t i = 0; i < numel; i++)
        nonfinite |= gc_store(job->out, dtype, segment->data + first + i, sums[i] * factor);
    job->nonfinite |= nonfinite;
}

void gc_topk_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    float sums[GC_TOPK_BLOCK_NUMEL];
    uint64_t codes = segment->codes;
    for (uint32_t first = 0, numel; first < segment->numel; first += numel) {
        numel = gc_topk_block_left(segment, first, segment->numel);
        uint32_t group = gc_run_at(segment, first, first + numel).group;
        memset(sums, 0, numel * sizeof(float));
        for (size_t p = 0; p < job->payload_count; p++)
            add_payload(job->payloads[p], job->payloads[p] + codes, segment, group, numel, sums);
        GC_BY_DTYPE(job->out_dtype, store_body(job, GC_F32, segment, first, numel, sums),
                    store_body(job, GC_BF16, segment, first, numel, sums),
                    store_body(job, GC_F16, segment, first, numel, sums));
        codes += gc_topk_block_nbytes(numel);
    }
}
