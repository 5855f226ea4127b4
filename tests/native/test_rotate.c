/* test_rotate.c - rotations in guarded memory: nothing beside the values is touched, and what is
 * turned back is what was turned. */
#include <math.h>

#include "harness.h"

static const uint32_t lengths[] = {0, 1, 2, 3, 7, 8, 31, 33, 128, 300, 1024, 1025, 2047, 5000};

static void test_there_and_back(uint32_t numel)
{
    uint32_t group = 1 + random_below(random_below(2) ? 2000 : 40), first = random_below(5000),
             parameter = random_below(9);
    gc_rng_key key = {random_below(9), 0, random_below(9), 4};
    snprintf(case_name, sizeof case_name, "numel %u group %u first %u", numel, group, first);
    size_t nbytes = numel * sizeof(float);
    float *values = guarded(0, nbytes, random_below(2) ? AT_END : AT_START, 0);
    float *before = guarded(1, nbytes, AT_END, 0);
    double largest = 0.0, left = 0.0;
    for (uint32_t i = 0; i < numel; i++) {
        before[i] = values[i] = (float)random_below(2000) / 100.0f - 10.0f;
        largest = fmax(largest, fabs(before[i]));
    }
    CHECK(gc_rotate(values, numel, group, first, parameter, key, 0) == GC_OK);
    CHECK(gc_rotate(values, numel, group, first, parameter, key, 1) == GC_OK);
    for (uint32_t i = 0; i < numel; i++)
        left = fmax(left, fabs(values[i] - before[i]));
    CHECK(left <= 1e-4 * largest);
    CHECK(gc_unbias(values, numel, group, first) == GC_OK);
    for (uint32_t i = 0; i < numel; i++) { /* any bytes */
        uint32_t bits = (uint32_t)random_u64();
        memcpy(values + i, &bits, sizeof bits);
    }
    CHECK(gc_rotate(values, numel, group, first, parameter, key, 0) == GC_OK);
    CHECK(gc_unbias(values, numel, group, first) == GC_OK);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 12;
    if (argc > 2)
        random_seed(strtoull(argv[2], NULL, 0));
    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            test_there_and_back(lengths[i]);
    printf("rotate: %d rounds\n", rounds);
    return 0;
}
