/* ternary_encode.c - stochastic ternary codes (TernGrad, Wen et al. 2017, equations 3 and 4).
 *
 * Deviation from the paper: a decision takes 16 random bits, and 32 more only when these tie with
 * the threshold, so that eight Philox blocks serve 64 elements. The probability is that of one
 * 48-bit comparison.
 */
#include "numeric.h"
#include "philox.h"

enum { CODE_ZERO = 1, SUPERBLOCK_NUMEL = 64 };

/* The 16-bit draws of the 64 elements of a superblock, laid out so that a vector of eight 32-bit
 * lanes makes them without moving a lane: block b holds the elements b, 8 + b, 16 + b, ... of the
 * superblock. */
static void superblock_draws(uint16_t draws[SUPERBLOCK_NUMEL], uint32_t superblock,
                             uint32_t parameter, const gc_rng_key *key)
{
    for (uint32_t b = 0; b < 8; b++) {
        uint32_t c[4] = {8 * superblock + b, parameter, key->step, key->stream};
        gc_philox(c, key->seed, key->rank);
        for (uint32_t word = 0; word < 4; word++) {
            draws[16 * word + b] = (uint16_t)c[word];
            draws[16 * word + 8 + b] = (uint16_t)(c[word] >> 16);
        }
    }
}

static uint32_t deep_draw(uint32_t element, uint32_t parameter, const gc_rng_key *key)
{
    uint32_t c[4] = {element / 4, parameter, key->step, key->stream | GC_DEEP_STREAM};
    gc_philox(c, key->seed, key->rank);
    return c[element % 4];
}

GC_INLINE unsigned code_of(float x, float scale, uint32_t draw, uint32_t element,
                           uint32_t parameter, const gc_rng_key *key)
{
    unsigned sign_code = gc_bits_of(x) >> 31 ? 0 : 2;
    float p = gc_float_of(gc_abs_bits(x)) / scale;
    if (!(scale > 0) || gc_is_nan(p))
        return CODE_ZERO;
    if (p >= 1)
        return sign_code;
    float t = p * 65536.0f; /* exact, below 65536 */
    uint32_t threshold = (uint32_t)t;
    if (draw != threshold)
        return draw < threshold ? sign_code : CODE_ZERO;
    float rest = (t - (float)threshold) * 4294967296.0f; /* exact, below 2^32 */
    return deep_draw(element, parameter, key) < (uint32_t)rest ? sign_code : CODE_ZERO;
}

unsigned gc_ternary_code(float x, float scale, uint32_t element, uint32_t parameter,
                         const gc_rng_key *key)
{
    uint32_t c[4] = {element / 64 * 8 + element % 8, parameter, key->step, key->stream};
    gc_philox(c, key->seed, key->rank);
    uint32_t word = c[element % 64 / 16], draw = element / 8 % 2 ? word >> 16 : word & 0xFFFF;
    return code_of(x, scale, draw, element, parameter, key);
}

GC_INLINE void encode_body(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                           uint32_t numel, int dtype)
{
    uint8_t *codes = job->payload + segment->codes;
    uint16_t draws[SUPERBLOCK_NUMEL];
    /* number of the superblock that `draws` holds; elements give at most 2^26 - 1 */
    uint32_t drawn = UINT32_MAX;
    for (uint32_t i = first, end = first + numel; i < end;) {
        gc_run run = gc_run_at(segment, i, end);
        float scale = gc_scale(job->payload, segment, run.group);
        for (; i < run.first + run.numel; i++) {
            uint32_t element = segment->start + i;
            if (element / SUPERBLOCK_NUMEL != drawn) {
                drawn = element / SUPERBLOCK_NUMEL;
                superblock_draws(draws, drawn, segment->parameter, &job->key);
            }
            float x = gc_load(job->src, dtype, segment->data + i);
            job->nonfinite |= !gc_is_finite(x);
            unsigned code = code_of(x, scale, draws[element % SUPERBLOCK_NUMEL], element,
                                    segment->parameter, &job->key);
            /* a new byte is all padding: 01, the zero code */
            uint8_t byte = i % 4 ? codes[i / 4] : 0x55;
            codes[i / 4] = (uint8_t)(byte ^ ((code ^ CODE_ZERO) << 2 * (i % 4)));
        }
    }
}

void gc_ternary_encode_span(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                            uint32_t numel)
{
    GC_BY_DTYPE(job->dtype, encode_body(job, segment, first, numel, GC_F32),
                encode_body(job, segment, first, numel, GC_BF16),
                encode_body(job, segment, first, numel, GC_F16));
}

void gc_ternary_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    gc_ternary_encode_span(job, segment, 0, segment->numel);
}
