/* rotate.c - random signs and a Hadamard transform, window by window of a scale group, and the
 * factor that makes signs unbiased.
 *
 * Additions in a fixed order, a sign or a product each: what compilers make of these loops rounds
 * the same in every lane, and the windows stay in the first cache, so all tiers use them.
 */
#include <string.h>

#include "checks.h"
#include "environment.h"
#include "numeric.h"
#include "philox.h"

enum { LANES = 8, BLOCK = 128 }; /* sums side by side; signs of one Philox block */

/* Flip the signs of at most 32 values by the bits of a word from bit `from` on. */
GC_INLINE void flip_by_word(float *restrict values, uint32_t word, uint32_t from, uint32_t count)
{
    static const uint32_t BIT[32] = {
        1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
        1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
        1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
        1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};
    uint32_t bits[32] = {0};
    word >>= from;
    memcpy(bits, values, count * sizeof bits[0]);
    for (int j = 0; j < 32; j++)
        bits[j] ^= (uint32_t)((word & BIT[j]) != 0) << 31;
    memcpy(values, bits, count * sizeof bits[0]);
}

static void flip(float *values, uint32_t numel, uint64_t first, uint32_t parameter, gc_rng_key key)
{
    for (uint32_t i = 0; i < numel;) {
        uint64_t element = first + i;
        uint32_t words[4] = {(uint32_t)(element / BLOCK), parameter, key.step, key.stream};
        gc_philox(words, key.seed, key.rank);
        for (uint32_t at = (uint32_t)(element % BLOCK); at < BLOCK && i < numel;) {
            uint32_t from = at % 32, count = 32 - from < numel - i ? 32 - from : numel - i;
            if (count == 32)
                flip_by_word(values + i, words[at / 32], 0, 32);
            else
                flip_by_word(values + i, words[at / 32], from, count);
            at += count;
            i += count;
        }
    }
}

/* Two steps of the transform at once, which spares every other pass over the window. */
GC_INLINE void two_steps(float *restrict v0, float *restrict v1, float *restrict v2,
                         float *restrict v3, uint32_t half)
{
    for (uint32_t j = 0; j < half; j++) {
        float a = v0[j], b = v1[j], c = v2[j], d = v3[j];
        float ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
        v0[j] = ab + cd;
        v1[j] = a_b + c_d;
        v2[j] = ab - cd;
        v3[j] = a_b - c_d;
    }
}

static void transform(float *values, uint32_t size)
{
    uint32_t half = 1;
    for (; 4 * half <= size; half *= 4)
        for (uint32_t i = 0; i < size; i += 4 * half) {
            float *v = values + i;
            if (half == 1) /* the compiler sees how long these loops are */
                two_steps(v, v + 1, v + 2, v + 3, 1);
            else if (half == 4)
                two_steps(v, v + 4, v + 8, v + 12, 4);
            else
                two_steps(v, v + half, v + 2 * half, v + 3 * half, half);
        }
    if (2 * half == size) {
        float *restrict low = values, *restrict high = values + half;
        for (uint32_t j = 0; j < half; j++) {
            float a = low[j], b = high[j];
            low[j] = a + b;
            high[j] = a - b;
        }
    }
    /* 1 / sqrt(size): a power of two, times fl(sqrt(1/2)) where size is an odd one */
    float factor = 1.0f;
    uint32_t rest = size;
    for (; rest >= 4; rest /= 4)
        factor *= 0.5f;
    if (rest == 2)
        factor *= 0.70710678f;
    for (uint32_t i = 0; i < size; i++)
        values[i] *= factor;
}

/* The windows of a run of one group: as many of `size` as fit, then one that ends where the run
 * does. */
static uint32_t window_of(uint32_t numel)
{
    uint32_t size = 1;
    while (size < GC_ROTATION_NUMEL && size <= numel / 2)
        size *= 2;
    return size;
}

/* One round; two of them make of any values some that look like normal ones, of a few large ones
 * among small ones, too. */
static void turn(float *values, uint32_t numel, uint64_t first, uint32_t parameter, gc_rng_key key,
                 int back)
{
    uint32_t size = window_of(numel), whole = numel / size * size;
    if (!back)
        flip(values, numel, first, parameter, key);
    if (back && whole < numel)
        transform(values + numel - size, size);
    for (uint32_t i = 0; i < whole; i += size)
        transform(values + i, size);
    if (!back && whole < numel)
        transform(values + numel - size, size);
    if (back)
        flip(values, numel, first, parameter, key);
}

typedef struct {
    double above[LANES], others[LANES], squares[LANES];
    uint32_t count[LANES]; /* of values above 0 */
} row_sums;

GC_INLINE void add_row(row_sums *restrict sums, const float *restrict row)
{
    for (int lane = 0; lane < LANES; lane++) {
        /* also of NaN, which spoils every sum */
        uint32_t bits = gc_bits_of(row[lane]), mask = -(uint32_t)((int32_t)bits > 0);
        double x = row[lane];
        sums->above[lane] += gc_float_of(bits & mask);
        sums->others[lane] += gc_float_of(bits & ~mask);
        sums->squares[lane] += x * x;
        sums->count[lane] -= mask;
    }
}

/* Multiply a run by |x|^2 / (P^2 / p + M^2 / m): then the means of its classes, turned back, are
 * what was rotated on average. */
static void unbias(float *values, uint32_t numel)
{
    row_sums sums = {{0}, {0}, {0}, {0}};
    uint32_t i = 0;
    for (; i + LANES <= numel; i += LANES)
        add_row(&sums, values + i);
    if (i < numel) {
        float row[LANES] = {0};
        memcpy(row, values + i, (numel - i) * sizeof row[0]);
        add_row(&sums, row);
    }
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) {
            sums.above[lane] += sums.above[lane + width];
            sums.others[lane] += sums.others[lane + width];
            sums.squares[lane] += sums.squares[lane + width];
            sums.count[lane] += sums.count[lane + width];
        }
    uint32_t count = sums.count[0];
    double explained = count ? sums.above[0] * sums.above[0] / count : 0.0;
    if (count < numel)
        explained += sums.others[0] * sums.others[0] / (numel - count);
    if (!(explained > 0.0)) /* zeros, or NaN, which the encoder finds */
        return;
    float factor = (float)(sums.squares[0] / explained);
    for (i = 0; i < numel; i++)
        values[i] *= factor;
}

static gc_status each_run(float *values, uint64_t numel, uint32_t group_numel, uint64_t first,
                          uint32_t parameter, gc_rng_key key, int what)
{
    if (!group_numel || (numel && !values) || first + numel > GC_MAX_NUMEL ||
        key.stream > INT32_MAX - GC_ROTATION_ROUNDS)
        return GC_INVALID_ARGUMENT;
    unsigned saved = gc_enter_float_environment();
    for (uint64_t i = 0; i < numel;) {
        uint64_t count = group_numel - (first + i) % group_numel;
        if (count > numel - i)
            count = numel - i;
        if (what == 2)
            unbias(values + i, (uint32_t)count);
        for (int round = 0; what < 2 && round < GC_ROTATION_ROUNDS; round++) {
            gc_rng_key drawn = key;
            drawn.stream += (uint32_t)(what ? GC_ROTATION_ROUNDS - 1 - round : round);
            turn(values + i, (uint32_t)count, first + i, parameter, drawn, what);
        }
        i += count;
    }
    gc_leave_float_environment(saved);
    return GC_OK;
}

gc_status gc_rotate(float *values, uint64_t numel, uint32_t group_numel, uint64_t first,
                    uint32_t parameter, gc_rng_key key, int back)
{
    return each_run(values, numel, group_numel, first, parameter, key, back != 0);
}

gc_status gc_unbias(float *values, uint64_t numel, uint32_t group_numel, uint64_t first)
{
    return each_run(values, numel, group_numel, first, 0, (gc_rng_key){0, 0, 0, 0}, 2);
}
