/* test_threads.c - what a pool of threads does: kernels on parts of one tensor, with one flag for
 * all, at once. Run under the thread sanitizer; the first calls race to choose the tier. */
#include <pthread.h>

#include "harness.h"

enum { THREADS = 4, PART_NUMEL = 4096, NUMEL = THREADS * PART_NUMEL };

static float tensor[NUMEL], residual[NUMEL], decoded[NUMEL], weights[NUMEL];
static uint8_t ternary[4 + NUMEL / 4], onebit[8 * THREADS + NUMEL / 8];
static uint8_t entropy[THREADS * GC_STREAM_NBYTES_LEAST];
static gc_block blocks[NUMEL / GC_BLOCK_NUMEL];
static uint32_t nonfinite;
static pthread_barrier_t ready;

static void check_ok(gc_status status) { CHECK(status == GC_OK); }

static void *work(void *number)
{
    uint32_t part = *(const uint32_t *)number, first = part * PART_NUMEL;
    gc_segment a = {first, first,      4 + first / 4, 0, first / GC_BLOCK_NUMEL,
                    first, PART_NUMEL, NUMEL,         1},
               b = a, c = a;
    b.codes = 8 * THREADS + first / 8;
    b.scales = 8 * part;
    b.group_numel = PART_NUMEL;
    c.scales = part * GC_STREAM_NBYTES_LEAST;
    c.codes = c.scales + 4;
    c.group_numel = GC_STREAM_NUMEL;
    const uint8_t *payload = ternary, *bits = onebit, *streams = entropy;
    gc_rng_key key = {1, 2, 3, 0};
    gc_rule rule = {.kind = GC_SGD, .step_size = -0.1f};
    gc_target target = {.weight = (uint64_t)(uintptr_t)weights, .rule = 0};
    gc_gradients from = {.payloads = &payload, .payload_count = 1, .from = GC_FROM_TERNARY};
    gc_segment of_weights = a;
    of_weights.parameter = 0;
    pthread_barrier_wait(&ready);
    check_ok(gc_block_sums(tensor, GC_F32, &a, 1, blocks, &nonfinite));
    check_ok(gc_ternary_encode(tensor, GC_F32, &a, 1, ternary, key, &nonfinite));
    check_ok(gc_onebit_encode(tensor, GC_F32, &b, 1, NULL, residual, NULL, 1.0f, NULL, NULL, onebit,
                              &nonfinite));
    check_ok(gc_entropy_encode(tensor, GC_F32, &c, 1, GC_STREAM_NBYTES_LEAST, NULL, NULL, NULL,
                               1.0f, NULL, entropy, &nonfinite)); /* the first makes the tables */
    check_ok(gc_entropy_sum_decode(&streams, 1, GC_STREAM_NBYTES_LEAST, &c, 1, decoded, GC_F32, 0,
                                   &nonfinite));
    check_ok(gc_ternary_sum_decode(&payload, 1, 1, &a, 1, decoded, GC_F32, 0, &nonfinite));
    check_ok(gc_onebit_sum_decode(&bits, 1, &b, 1, decoded, GC_F32, GC_STREAM, &nonfinite));
    check_ok(gc_update(&from, &of_weights, 1, &target, 1, &rule, 1, NULL, &nonfinite));
    return NULL;
}

int main(void)
{
    float scale = 2.0f;
    uint32_t numbers[THREADS];
    pthread_t threads[THREADS];
    fill_tensor(tensor, GC_F32, NUMEL, NORMAL);
    for (uint32_t part = 0; part < THREADS; part++) /* every thread sets the flag */
        tensor[part * PART_NUMEL + 100] = (float)(1e30 * 1e30);
    memcpy(ternary, &scale, 4);
    CHECK(pthread_barrier_init(&ready, NULL, THREADS) == 0);
    for (uint32_t t = 0; t < THREADS; t++) {
        numbers[t] = t;
        CHECK(pthread_create(&threads[t], NULL, work, &numbers[t]) == 0);
    }
    for (uint32_t t = 0; t < THREADS; t++)
        CHECK(pthread_join(threads[t], NULL) == 0);
    CHECK(nonfinite == 1);
    puts("test_threads: ok");
    return 0;
}
