/* topk_encode.c - the largest elements of every block, with error feedback: what is kept, where it
 * stands, two means a group.
 *
 * One pass over memory: a block is staged, what is kept of it noted, and x written as its residual;
 * when a group's means are known, the residuals of what was kept are written again. The k-th
 * largest of a block is looked for among the few elements above a guess, a little below that of the
 * block before. A guess that is too high costs a second look, never a byte.
 */
#include "topk.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* GUESS_STEP: a quarter of the mantissa's range, so that a guess is 0.8 to 0.9 of the number it is
 * made from. */
enum { GUESS_STEP = 1 << 21, NO_GUESS = GC_ABS_MASK };

typedef struct {
    float x[GC_TOPK_BLOCK_NUMEL];
    uint32_t magnitudes[GC_TOPK_BLOCK_NUMEL];
    uint16_t candidates[GC_TOPK_BLOCK_NUMEL];
    uint32_t absmax_bits, any_gradient; /* of the block; any_gradient is 0 when every |g| is 0 */
    /* at least k elements of the next block are hoped not to be below it */
    uint32_t guess;
} block_stage;

/* What is kept of a group, in order. */
typedef struct {
    uint32_t count;
    uint32_t positions[GC_TOPK_GROUP_KEPT]; /* in the segment */
    float x[GC_TOPK_GROUP_KEPT];
} kept_values;

/* ---- a block --------------------------------------------------------------------------------- */
GC_INLINE void stage_body(const gc_encode_job *job, int dtype, const gc_segment *segment,
                          uint32_t first, uint32_t numel, block_stage *stage)
{
    const float *residual = job->residual_in ? job->residual_in + segment->residual + first : NULL;
    /* signed: all are below 2^31, and more processors compare signed vectors */
    int32_t largest = 0, any_gradient = 0;
    for (uint32_t i = 0; i < numel; i++) {
        float g = gc_load(job->src, dtype, segment->data + first + i),
              x = residual ? g + residual[i] : g;
        int32_t magnitude = (int32_t)gc_abs_bits(x);
        stage->x[i] = x;
        largest = magnitude > largest ? magnitude : largest;
        any_gradient |= (int32_t)gc_abs_bits(g);
    }
    stage->absmax_bits = (uint32_t)largest;
    stage->any_gradient = (uint32_t)any_gradient;
}

static void stage_block(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                        uint32_t numel, block_stage *stage)
{
    gc_keep_residuals(job, segment, first, numel);
    GC_BY_DTYPE(job->dtype, stage_body(job, GC_F32, segment, first, numel, stage),
                stage_body(job, GC_BF16, segment, first, numel, stage),
                stage_body(job, GC_F16, segment, first, numel, stage));
    if (stage->absmax_bits > GC_INF_BITS)
        for (uint32_t i = 0; i < numel; i++)
            stage->x[i] = gc_is_nan(stage->x[i]) ? gc_float_of(GC_NAN_BITS) : stage->x[i];
    job->nonfinite |= stage->absmax_bits >= GC_INF_BITS;
    if (job->residual_out)
        memcpy(job->residual_out + segment->residual + first, stage->x, numel * sizeof(float));
}

/* The k-th largest of `numel` numbers below 2^31 (1 <= k <= numel), which are moved about: byte by
 * byte from the top, what has the same bytes so far. */
static uint32_t kth_largest(uint32_t *numbers, uint32_t numel, uint32_t k)
{
    for (unsigned shift = 24; numel > 1; shift -= 8) {
        uint16_t counts[256] = {0};
        for (uint32_t i = 0; i < numel; i++)
            counts[numbers[i] >> shift & 0xFF]++;
        uint32_t digit = 255, same = 0;
        while (counts[digit] < k)
            k -= counts[digit--];
        for (uint32_t i = 0; i < numel; i++) {
            uint32_t number = numbers[i];
            numbers[same] = number;
            same += (number >> shift & 0xFF) == digit;
        }
        numel = same;
        if (!shift)
            break;
    }
    return numbers[0];
}

/* List the elements that are not below `least`, in order. */
static uint32_t list_candidates(block_stage *stage, uint32_t numel, uint32_t least)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < numel; i++) {
        stage->candidates[count] = (uint16_t)i;
        count += gc_abs_bits(stage->x[i]) >= least;
    }
    return count;
}

/* Add the k largest of the staged block to what is kept. */
static void keep_largest(block_stage *stage, uint32_t first, uint32_t numel, uint32_t k,
                         kept_values *kept)
{
    uint32_t count = list_candidates(stage, numel, stage->guess), least = 0;
    if (count < k)
        count = list_candidates(stage, numel, 0);
    if (stage->absmax_bits) {
        for (uint32_t c = 0; c < count; c++)
            stage->magnitudes[c] = gc_abs_bits(stage->x[stage->candidates[c]]);
        least = kth_largest(stage->magnitudes, count, k);
        stage->guess = least > GUESS_STEP ? least - GUESS_STEP : 0;
    }
    uint32_t ties = k; /* of elements as large as the k-th, the first so many are kept */
    for (uint32_t c = 0; c < count; c++)
        ties -= gc_abs_bits(stage->x[stage->candidates[c]]) > least;
    for (uint32_t c = 0; c < count; c++) {
        uint32_t i = stage->candidates[c], magnitude = gc_abs_bits(stage->x[i]);
        if (magnitude < least || (magnitude == least && !ties))
            continue;
        ties -= magnitude == least;
        kept->positions[kept->count] = first + i;
        kept->x[kept->count++] = stage->x[i];
    }
}

/* Write the k bytes of the gaps between kept positions, of which the block's first is `first`. */
static void write_gaps(uint8_t *codes, const uint32_t *positions, uint32_t k, uint32_t first)
{
    /* a byte that is written to is followed by seven more */
    uint8_t bytes[GC_TOPK_BLOCK_KEPT + 8] = {0};
    uint32_t bit = 0;
    for (uint32_t j = 0; j < k; j++) {
        uint32_t gap = positions[j] - first, quotient = gap / GC_TOPK_DENSITY;
        for (uint32_t end = bit + quotient; bit < end; bit++)
            bytes[bit / 8] |= (uint8_t)(1u << bit % 8);
        uint32_t word = gap % GC_TOPK_DENSITY << 1 << bit % 8; /* the 0 below it */
        bytes[bit / 8] |= (uint8_t)word;
        bytes[bit / 8 + 1] |= (uint8_t)(word >> 8);
        bit += 1 + GC_TOPK_LOW_BITS;
        first = positions[j] + 1;
    }
    memcpy(codes, bytes, k);
}

/* ---- a group --------------------------------------------------------------------------------- */
typedef struct {
    double mean;
    float scales[2]; /* inner, outer */
} kept_means;

static kept_means means_of(const kept_values *kept)
{
    double sums[2] = {0, 0}, sum = 0;
    uint32_t counts[2] = {0, 0};
    for (uint32_t j = 0; j < kept->count; j++)
        sum += gc_float_of(gc_abs_bits(kept->x[j]));
    kept_means means = {sum / kept->count, {0, 0}};
    for (uint32_t j = 0; j < kept->count; j++) {
        double magnitude = gc_float_of(gc_abs_bits(kept->x[j]));
        uint32_t outer = magnitude > means.mean;
        sums[outer] += magnitude;
        counts[outer]++;
    }
    for (int outer = 0; outer < 2; outer++)
        if (counts[outer])
            means.scales[outer] = (float)(sums[outer] / counts[outer]);
    return means;
}

/* Write the value bits of a group's blocks behind their gaps, and what is left of what was kept. */
static void write_values(gc_encode_job *job, const gc_segment *segment, gc_run run,
                         const kept_values *kept, const kept_means *means)
{
    uint8_t *codes = job->payload + segment->codes + gc_topk_nbytes(segment->start, run.first);
    uint32_t j = 0, end = run.first + run.numel;
    for (uint32_t first = run.first, numel; first < end; first += numel) {
        numel = gc_topk_block_left(segment, first, end);
        uint32_t k = gc_topk_count(numel);
        uint8_t *values = codes + k;
        memset(values, 0, (k + 3) / 4);
        for (uint32_t i = 0; i < k; i++, j++) {
            uint32_t bits = gc_bits_of(kept->x[j]), sign = bits >> 31;
            uint32_t outer = (double)gc_float_of(bits & GC_ABS_MASK) > means->mean;
            float scale = means->scales[outer], q = sign ? 0 - scale : scale;
            values[i / 4] |= (uint8_t)((sign | outer << 1) << 2 * (i % 4));
            if (job->residual_out)
                job->residual_out[segment->residual + kept->positions[j]] = kept->x[j] - q;
        }
        codes += gc_topk_block_nbytes(numel);
    }
}

static void encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run,
                         block_stage *stage)
{
    kept_values kept;
    uint8_t *codes = job->payload + segment->codes + gc_topk_nbytes(segment->start, run.first);
    uint32_t absmax_bits = 0, any_gradient = 0, end = run.first + run.numel;
    kept.count = 0;
    for (uint32_t first = run.first, numel; first < end; first += numel) {
        numel = gc_topk_block_left(segment, first, end);
        uint32_t k = gc_topk_count(numel), before = kept.count;
        stage_block(job, segment, first, numel, stage);
        keep_largest(stage, first, numel, k, &kept);
        write_gaps(codes, kept.positions + before, k, first);
        codes += gc_topk_block_nbytes(numel);
        absmax_bits = stage->absmax_bits > absmax_bits ? stage->absmax_bits : absmax_bits;
        any_gradient |= stage->any_gradient;
    }
    kept_means means = means_of(&kept);
    if (absmax_bits >= GC_INF_BITS || !any_gradient)
        means.scales[0] = means.scales[1] = 0;
    uint8_t *scales = job->payload + segment->scales + 8 * (size_t)run.group;
    gc_store_u32(scales, gc_bits_of(means.scales[0]));
    gc_store_u32(scales + 4, gc_bits_of(means.scales[1]));
    write_values(job, segment, run, &kept, &means);
}

void gc_topk_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    block_stage stage;
    stage.guess = NO_GUESS;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        encode_group(job, segment, run, &stage);
        i += run.numel;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
