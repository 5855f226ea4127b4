/* fuzz_kernels.c - test_tiers.c with cases that libFuzzer chooses: every encoder, decoder, check
 * and round trip, on every tier, from buffers that end or begin at a page that may not be touched.
 */
#define main tiers_main
#include "test_tiers.c"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    random_from(data, nbytes);
    uint32_t which = random_below(TEST_COUNT + 1);
    if (which < TEST_COUNT)
        tests[which](make_case(random_below(random_below(8) ? 300 : 9000)));
    else
        test_tables();
    return 0;
}
