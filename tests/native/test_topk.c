/* test_topk.c - top-k codes in guarded memory: what an encoder writes passes and decodes to what it
 * took from x, and no bytes make a decoder or a validator touch what is not theirs.
 */
#include "harness.h"

enum { CANARY = 0xA5, TENSOR = 0, RESIDUAL = 1, OUTPUT = 2, PAYLOAD = 6, MOST_PAYLOADS = 5 };

static const uint32_t lengths[] = {0,    1,    2,    63,   64,    65,    127,   1000, 4031,
                                   4095, 4096, 4097, 8200, 12289, 32767, 32769, 70000};

typedef struct {
    gc_segment segment;
    int dtype;
    value_kind kind;
    placement where;
    size_t code_nbytes, scale_nbytes, payload_nbytes;
} test_case;

static size_t size_of(int dtype) { return dtype == GC_F32 ? 4 : 2; }

/* Block by block, as gradcomp.h has it. */
static size_t code_nbytes_of(const gc_segment *s)
{
    size_t nbytes = 0;
    for (uint32_t i = 0, left; i < s->numel; i += left) {
        left = 4096 - (s->start + i) % 4096;
        left = left < s->numel - i ? left : s->numel - i;
        nbytes += (left + 63) / 64 + ((left + 63) / 64 + 3) / 4;
    }
    return nbytes;
}

static test_case make_case(uint32_t numel)
{
    test_case c;
    memset(&c, 0, sizeof c);
    c.segment.numel = numel;
    c.segment.group_numel = GC_TOPK_GROUP_NUMEL;
    c.segment.start = 8 * random_below(random_below(2) ? 12 : 9000);
    if (random_below(20) == 0)
        c.segment.start = (UINT32_MAX - numel) / 8 * 8;
    uint32_t first = c.segment.start / GC_TOPK_GROUP_NUMEL;
    uint32_t groups = numel ? (c.segment.start + numel - 1) / GC_TOPK_GROUP_NUMEL - first + 1 : 0;
    c.dtype = (int)random_below(3);
    c.kind = random_below(3) ? NORMAL : (value_kind)random_below(KIND_COUNT);
    c.where = random_below(2) ? AT_END : AT_START;
    c.segment.data = random_below(9);
    c.segment.residual = random_below(9);
    c.code_nbytes = code_nbytes_of(&c.segment);
    c.scale_nbytes = 8 * (size_t)groups;
    int scales_first = random_below(2) != 0;
    c.segment.scales = scales_first ? 3 : 3 + c.code_nbytes;
    c.segment.codes = scales_first ? 3 + c.scale_nbytes : 3;
    c.payload_nbytes = 3 + c.scale_nbytes + c.code_nbytes;
    snprintf(case_name, sizeof case_name, "numel %u start %u dtype %d kind %d", numel,
             c.segment.start, c.dtype, c.kind);
    return c;
}

/* x = fl(g + r) is decoded value + residual, in exact arithmetic as far as fp32 goes: residual ==
 * fl(x - q). */
static void test_encode(test_case c)
{
    size_t numel = c.segment.data + c.segment.numel, plane = c.segment.residual + c.segment.numel;
    void *src = guarded(TENSOR, numel * size_of(c.dtype), c.where, CANARY);
    fill_tensor(src, c.dtype, numel, c.kind);
    float *before = guarded(RESIDUAL, 4 * plane, c.where, 0),
          *after = guarded(OUTPUT, 4 * plane, c.where, CANARY);
    float *x = guarded(OUTPUT + 1, 4 * numel, c.where, 0),
          *out = guarded(OUTPUT + 2, 4 * numel, c.where, 0);
    fill_tensor(before, GC_F32, plane, NORMAL);
    uint8_t *payload = guarded(PAYLOAD, c.payload_nbytes, c.where, CANARY);
    uint32_t flag = 0, ignored = 0;
    CHECK(gc_topk_encode(src, c.dtype, &c.segment, 1, before, after, NULL, payload, &flag) ==
          GC_OK);
    CHECK(gc_topk_validate(payload, &c.segment, 1) == GC_OK);
    CHECK(gc_scales_validate(payload + c.segment.scales, c.scale_nbytes / 4, 1) == GC_OK);
    CHECK(memcmp(payload, "\xA5\xA5\xA5", 3) == 0);
    const uint8_t *one[] = {payload};
    CHECK(gc_topk_sum_decode(one, 1, &c.segment, 1, out, GC_F32, 0, &ignored) == GC_OK && !ignored);
    gc_segment plain = c.segment; /* values as fp32, by way of a payload */
    plain.codes = 0;
    uint8_t *values = guarded(PAYLOAD + 1, 4 * (size_t)c.segment.numel, c.where, 0);
    CHECK(gc_values_encode(src, c.dtype, &plain, 1, GC_F32, values, &ignored) == GC_OK);
    memcpy(x, values, 4 * (size_t)c.segment.numel);
    for (uint32_t i = 0; i < c.segment.numel && !flag; i++) {
        float sum = x[i] + before[c.segment.residual + i], left = sum - out[c.segment.data + i];
        CHECK(memcmp(&left, &after[c.segment.residual + i], 4) == 0 ||
              (left == 0 && after[c.segment.residual + i] == 0));
    }
    for (uint32_t i = 0; i < c.segment.residual; i++)
        CHECK(memcmp(&after[i], "\xA5\xA5\xA5\xA5", 4) == 0);
}

/* Updates straight from payloads are updates from what they decode to, cut into blocks or not. */
static void test_update(test_case c, const uint8_t *const *payloads, size_t count)
{
    uint32_t numel = c.segment.numel;
    float *mean = guarded(TENSOR, 4 * (size_t)numel, c.where, 0),
          *one = guarded(RESIDUAL, 4 * (size_t)numel, c.where, 0);
    float *other = guarded(OUTPUT, 4 * (size_t)numel, c.where, 0);
    uint32_t flags[2] = {0, 0};
    gc_segment segment = c.segment;
    segment.data = 0;
    CHECK(gc_topk_sum_decode(payloads, count, &segment, 1, mean, GC_F32, 0, &flags[0]) == GC_OK);
    uint64_t skipped = 4 * (uint64_t)segment.start;
    gc_rule rule = {.kind = GC_SGD, .step_size = -0.5f};
    gc_target target = {.weight = (uint64_t)(uintptr_t)one - skipped,
                        .gradient = (uint64_t)(uintptr_t)mean - skipped};
    gc_gradients from = {.from = GC_FROM_TENSORS};
    CHECK(gc_update(&from, &segment, 1, &target, 1, &rule, 1, NULL, &flags[1]) == GC_OK);
    flags[1] = 0;
    from = (gc_gradients){.from = GC_FROM_TOPK, .payloads = payloads, .payload_count = count};
    target.weight = (uint64_t)(uintptr_t)other - skipped;
    CHECK(gc_update(&from, &segment, 1, &target, 1, &rule, 1, NULL, &flags[1]) == GC_OK);
    CHECK(memcmp(one, other, 4 * (size_t)numel) == 0 && flags[0] == flags[1]);
    segment.group_numel = 4096;
    CHECK(!numel || gc_update(&from, &segment, 1, &target, 1, &rule, 1, NULL, &flags[1]) ==
                        GC_INVALID_ARGUMENT);
}

/* Any bytes: what counts is which are touched, and that what passes is what decodes. */
static void test_hostile(test_case c)
{
    const uint8_t *payloads[MOST_PAYLOADS];
    size_t count = 1 + random_below(MOST_PAYLOADS), numel = c.segment.data + c.segment.numel;
    uint32_t share = random_below(4), flag = 0;
    for (size_t p = 0; p < count; p++) {
        uint8_t *payload = guarded(PAYLOAD + (int)p, c.payload_nbytes, c.where, 0);
        for (size_t i = 0; i < c.payload_nbytes; i++)
            payload[i] = share == 0                      ? 0xFF
                         : share == 1 && random_below(9) ? 0
                                                         : (uint8_t)random_u64();
        payloads[p] = payload;
        (void)gc_topk_validate(payload, &c.segment, 1);
    }
    for (int dtype = GC_F32; dtype <= GC_F16; dtype++) {
        uint8_t *out = guarded(OUTPUT, numel * size_of(dtype), c.where, CANARY);
        CHECK(gc_topk_sum_decode(payloads, count, &c.segment, 1, out, dtype, GC_STREAM, &flag) ==
              GC_OK);
        for (size_t i = 0; i < c.segment.data * size_of(dtype); i++)
            CHECK(out[i] == CANARY);
    }
    test_update(c, payloads, count);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 12;
    if (argc > 2)
        random_seed(strtoull(argv[2], NULL, 0));
    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            uint32_t numel = lengths[i] + random_below(2) * random_below(5);
            test_encode(make_case(numel));
            test_hostile(make_case(numel));
        }
    printf("topk: %d rounds\n", rounds);
    return 0;
}
