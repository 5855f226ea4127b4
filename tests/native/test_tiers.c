/* test_tiers.c - every kernel on every tier gives the bytes of the portable tier, and touches no
 * byte but its own.
 *
 * A case is a segment in buffers that end (or begin) at a page that may not be touched, with a
 * random length, start, group size, dtype, offsets and kind of values. Tier 0 runs first; the
 * others must leave every buffer like it.
 */
#include "harness.h"

enum {
    CANARY = 0xA5,
    MAX_PAYLOADS_HERE = 160,
    TENSOR = 0,
    RESIDUAL = 1,
    OUTPUT = 2,
    PAYLOAD = 6,
    EXPECTED = 40
};

static const uint32_t lengths[] = {511,  512,  513,  1023, 1024, 1025, 1040, 2047,
                                   4095, 4096, 4097, 4111, 8191, 8200, 12289};
static const uint32_t group_sizes[] = {1,   3,   7,   8,   16,  24,  63,   64,   65,   100,
                                       128, 500, 511, 512, 513, 777, 1024, 4096, 4097, 5000};

typedef struct {
    gc_segment segment;
    int dtype, out_dtype;
    value_kind kind;
    placement where;
    unsigned flags;
    size_t tensor_numel, residual_numel;
} test_case;

static size_t size_of(int dtype) { return dtype == GC_F32 ? 4 : 2; }

static uint32_t group_count(const gc_segment *s)
{
    return s->numel ? (s->start + s->numel - 1) / s->group_numel - s->start / s->group_numel + 1
                    : 0;
}

static test_case make_case(uint32_t numel)
{
    test_case c;
    memset(&c, 0, sizeof c);
    c.segment.numel = numel;
    c.segment.start = 8 * random_below(random_below(2) ? 12 : 4000);
    if (random_below(50) == 0)
        c.segment.start = (UINT32_MAX - numel) / 8 * 8;
    uint32_t choice = random_below(sizeof group_sizes / sizeof group_sizes[0] + 4);
    c.segment.group_numel = choice < sizeof group_sizes / sizeof group_sizes[0]
                                ? group_sizes[choice]
                            : choice % 2 ? UINT32_MAX
                                         : 1 + random_below(2 * numel + 1);
    c.dtype = (int)random_below(3);
    c.out_dtype = (int)random_below(3);
    c.kind = random_below(3) ? NORMAL : (value_kind)random_below(KIND_COUNT);
    c.where = random_below(2) ? AT_END : AT_START;
    c.flags = random_below(2) ? GC_STREAM : 0;
    c.segment.data = random_below(2) ? 0 : random_below(40);
    c.segment.residual = random_below(2) ? 0 : random_below(40);
    c.segment.parameter = (uint32_t)random_u64();
    c.tensor_numel = c.segment.data + numel + (c.where == AT_START ? random_below(5) : 0);
    c.residual_numel = c.segment.residual + numel + (c.where == AT_START ? random_below(5) : 0);
    snprintf(case_name, sizeof case_name,
             "numel %u start %u group %u dtype %d out %d kind %d flags %u data %u %s", numel,
             c.segment.start, c.segment.group_numel, c.dtype, c.out_dtype, c.kind, c.flags,
             (unsigned)c.segment.data, c.where == AT_END ? "at end" : "at start");
    return c;
}

static void *make_source(const test_case *c, int slot)
{
    void *tensor = guarded(slot, c->tensor_numel * size_of(c->dtype), c->where, CANARY);
    fill_tensor(tensor, c->dtype, c->tensor_numel, c->kind);
    return tensor;
}

/* Place scales and codes, in either order, at odd offsets; returns the payload's size. */
static size_t place_codes(test_case *c, uint32_t scales_per_group, uint64_t codes)
{
    uint64_t scales = 4ull * scales_per_group * group_count(&c->segment);
    uint64_t gap = random_below(6), first = random_below(4);
    int scales_first = random_below(2) != 0;
    c->segment.scales = scales_first ? first : first + codes + gap;
    c->segment.codes = scales_first ? first + scales + gap : first;
    return first + scales + gap + codes + (c->where == AT_START ? 3 : 0);
}

static size_t place(test_case *c, uint32_t scales_per_group, uint32_t bits)
{
    return place_codes(c, scales_per_group, ((uint64_t)c->segment.numel * bits + 7) / 8);
}

/* Elements of the stream in which element `first` of a segment begins one. */
static uint32_t stream_numel(const gc_segment *s, uint32_t first)
{
    uint32_t left = GC_STREAM_NUMEL - (s->start + first) % GC_STREAM_NUMEL;
    return left < s->numel - first ? left : s->numel - first;
}

static uint32_t stream_nbytes_of(uint32_t numel, uint32_t stream_nbytes)
{
    return numel == GC_STREAM_NUMEL
               ? stream_nbytes - 4
               : (numel * stream_nbytes + GC_STREAM_NUMEL - 1) / GC_STREAM_NUMEL + 4;
}

/* Groups become streams; returns the bytes of their codes. */
static size_t make_streams(test_case *c, uint32_t stream_nbytes)
{
    size_t nbytes = 0;
    c->segment.group_numel = GC_STREAM_NUMEL;
    for (uint32_t i = 0, numel; i < c->segment.numel; i += numel) {
        numel = stream_numel(&c->segment, i);
        nbytes += stream_nbytes_of(numel, stream_nbytes);
    }
    return nbytes;
}

static uint32_t random_stream_nbytes(void)
{
    static const uint32_t some[] = {GC_STREAM_NBYTES_LEAST, 640, 1126, GC_STREAM_NBYTES_MOST};
    return random_below(3) ? some[random_below(4)]
                           : GC_STREAM_NBYTES_LEAST +
                                 random_below(GC_STREAM_NBYTES_MOST - GC_STREAM_NBYTES_LEAST + 1);
}

static void put_scales(uint8_t *payload, const test_case *c, uint32_t scales_per_group,
                       value_kind kind, int positive)
{
    for (uint32_t g = 0; g < scales_per_group * group_count(&c->segment); g++) {
        float scale = random_value(kind);
        if (positive && scale < 0)
            scale = -scale;
        memcpy(payload + c->segment.scales + 4 * g, &scale, 4);
    }
}

/* Run `call` on every tier; what it writes to `buffer` and `flag` must be what tier 0 writes. */
#define ON_EVERY_TIER(call, slot, buffer, nbytes, where, reset)   \
    do {                                                          \
        uint8_t *expected_ = guarded(EXPECTED, nbytes, where, 0); \
        uint32_t expected_flag_ = 0;                              \
        for (int tier_ = 0; tier_ < gc_tier_count(); tier_++) {   \
            if (!gc_tier_supported(tier_))                        \
                continue;                                         \
            CHECK(gc_tier_select(tier_) == GC_OK);                \
            uint32_t flag = 0;                                    \
            reset;                                                \
            CHECK((call) == GC_OK);                               \
            if (tier_ == 0) {                                     \
                memcpy(expected_, buffer, nbytes);                \
                expected_flag_ = flag;                            \
            }                                                     \
            CHECK(flag == expected_flag_);                        \
            CHECK(memcmp(buffer, expected_, nbytes) == 0);        \
        }                                                         \
    } while (0)

/* Bytes of `payload` outside [scales) and [codes) are as they were. */
static void check_untouched(const uint8_t *payload, size_t nbytes, const gc_segment *s,
                            size_t scales, size_t codes)
{
    for (size_t i = 0; i < nbytes; i++)
        if (!(i >= s->scales && i < s->scales + scales) && !(i >= s->codes && i < s->codes + codes))
            CHECK(payload[i] == CANARY);
}

static void test_block_sums(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    uint32_t block_count = 0, numel = c.segment.numel,
             offset = c.segment.start % c.segment.group_numel;
    for (uint32_t i = 0; i < numel;) { /* groups as cut by the segment */
        uint64_t left = (uint64_t)c.segment.group_numel - offset;
        uint32_t run = left < numel - i ? (uint32_t)left : numel - i;
        block_count += (run + GC_BLOCK_NUMEL - 1) / GC_BLOCK_NUMEL;
        i += run;
        offset = 0;
    }
    c.segment.block = random_below(3);
    size_t nbytes = (c.segment.block + block_count) * sizeof(gc_block);
    gc_block *blocks = guarded(OUTPUT, nbytes, c.where, CANARY);
    ON_EVERY_TIER(gc_block_sums(src, c.dtype, &c.segment, 1, blocks, &flag), OUTPUT, blocks, nbytes,
                  c.where, guarded(OUTPUT, nbytes, c.where, CANARY));
}

static void test_ternary_encode(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    size_t nbytes = place(&c, 1, 2);
    gc_rng_key key = {(uint32_t)random_u64(), (uint32_t)random_u64(), (uint32_t)random_u64(),
                      random_below(4)};
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY),
            *scales = guarded(EXPECTED + 1, nbytes, c.where, CANARY);
    static const value_kind scale_kinds[] = {NORMAL, NORMAL,      NORMAL,    ZEROS,
                                             TINY,   HUGE_VALUES, NONFINITE, ANY_BITS};
    put_scales(scales, &c, 1, scale_kinds[random_below(8)], random_below(10) != 0);
    ON_EVERY_TIER(gc_ternary_encode(src, c.dtype, &c.segment, 1, payload, key, &flag), PAYLOAD,
                  payload, nbytes, c.where, memcpy(payload, scales, nbytes));
    check_untouched(payload, nbytes, &c.segment, 4 * (size_t)group_count(&c.segment),
                    (c.segment.numel + 3) / 4);
    CHECK(gc_ternary_validate(payload, &c.segment, 1) == GC_OK);
}

static void test_onebit_encode(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    size_t nbytes = place(&c, 2, 1), residual_nbytes = 4 * c.residual_numel;
    if (random_below(4) == 0) /* groups whose gradient is zero, with a residual */
        memset((uint8_t *)src + c.segment.data * size_of(c.dtype), 0,
               c.segment.numel / 2 * size_of(c.dtype));
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    float *before = guarded(RESIDUAL, residual_nbytes, c.where, 0);
    float *residual = guarded(OUTPUT, residual_nbytes, c.where, 0);
    fill_tensor(before, GC_F32, c.residual_numel, random_below(4) ? NORMAL : c.kind);
    int mode = (int)random_below(4); /* no residual, separate planes, in place, none kept */
    const float *in = mode == 0 ? NULL : mode == 2 ? residual : before;
    float *out = mode == 3 ? NULL : residual;
    /* Both outputs are compared: the payload here, the residual in the second run. */
    ON_EVERY_TIER(gc_onebit_encode(src, c.dtype, &c.segment, 1, in, out, NULL, 1.0f, NULL, NULL,
                                   payload, &flag),
                  PAYLOAD, payload, nbytes, c.where,
                  (memset(payload, CANARY, nbytes), memcpy(residual, before, residual_nbytes)));
    check_untouched(payload, nbytes, &c.segment, 8 * (size_t)group_count(&c.segment),
                    (c.segment.numel + 7) / 8);
    CHECK(gc_onebit_validate(payload, &c.segment, 1) == GC_OK);
    ON_EVERY_TIER(gc_onebit_encode(src, c.dtype, &c.segment, 1, in, out, NULL, 1.0f, NULL, NULL,
                                   payload, &flag),
                  OUTPUT, residual, residual_nbytes, c.where,
                  memcpy(residual, before, residual_nbytes));
    for (size_t i = 0; i < c.residual_numel; i++)
        if (mode == 3 || i < c.segment.residual || i >= c.segment.residual + c.segment.numel)
            CHECK(memcmp(&residual[i], &before[i], 4) == 0);
}

static void test_block_encode(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    unsigned bits = 2u << random_below(3);
    size_t nbytes = place(&c, 1, bits), residual_nbytes = 4 * c.residual_numel;
    if (random_below(4) == 0) /* groups whose gradient is zero, with a residual */
        memset((uint8_t *)src + c.segment.data * size_of(c.dtype), 0,
               c.segment.numel / 2 * size_of(c.dtype));
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    float *before = guarded(RESIDUAL, residual_nbytes, c.where, 0);
    float *residual = guarded(OUTPUT, residual_nbytes, c.where, 0);
    fill_tensor(before, GC_F32, c.residual_numel, random_below(4) ? NORMAL : c.kind);
    int mode = (int)random_below(4); /* no residual, separate planes, in place, none kept */
    const float *in = mode == 0 ? NULL : mode == 2 ? residual : before;
    float *out = mode == 3 ? NULL : residual;
    /* Both outputs are compared: the payload here, the residual in the second run. */
    ON_EVERY_TIER(gc_block_encode(src, c.dtype, &c.segment, 1, bits, in, out, NULL, 1.0f, NULL,
                                  payload, &flag),
                  PAYLOAD, payload, nbytes, c.where,
                  (memset(payload, CANARY, nbytes), memcpy(residual, before, residual_nbytes)));
    check_untouched(payload, nbytes, &c.segment, 4 * (size_t)group_count(&c.segment),
                    ((size_t)c.segment.numel * bits + 7) / 8);
    CHECK(gc_block_validate(payload, bits, &c.segment, 1) == GC_OK);
    ON_EVERY_TIER(gc_block_encode(src, c.dtype, &c.segment, 1, bits, in, out, NULL, 1.0f, NULL,
                                  payload, &flag),
                  OUTPUT, residual, residual_nbytes, c.where,
                  memcpy(residual, before, residual_nbytes));
    for (size_t i = 0; i < c.residual_numel; i++)
        if (mode == 3 || i < c.segment.residual || i >= c.segment.residual + c.segment.numel)
            CHECK(memcmp(&residual[i], &before[i], 4) == 0);
}

static void test_nearest_encode(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    double step = random_below(4) ? 1.8 : 1e30;
    float decay = random_below(2) ? 1.0f : 0.25f;
    size_t nbytes = place(&c, 1, 2), residual_nbytes = 4 * c.residual_numel;
    if (random_below(4) == 0) /* groups whose gradient is zero, with a residual */
        memset((uint8_t *)src + c.segment.data * size_of(c.dtype), 0,
               c.segment.numel / 2 * size_of(c.dtype));
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    float *before = guarded(RESIDUAL, residual_nbytes, c.where, 0);
    float *residual = guarded(OUTPUT, residual_nbytes, c.where, 0);
    fill_tensor(before, GC_F32, c.residual_numel, random_below(4) ? NORMAL : c.kind);
    int mode = (int)random_below(4); /* no residual, separate planes, in place, none kept */
    const float *in = mode == 0 ? NULL : mode == 2 ? residual : before;
    float *out = mode == 3 ? NULL : residual;
    /* Both outputs are compared: the payload here, the residual in the second run. */
    ON_EVERY_TIER(gc_nearest_encode(src, c.dtype, &c.segment, 1, step, in, out, NULL, decay, NULL,
                                    payload, &flag),
                  PAYLOAD, payload, nbytes, c.where,
                  (memset(payload, CANARY, nbytes), memcpy(residual, before, residual_nbytes)));
    check_untouched(payload, nbytes, &c.segment, 4 * (size_t)group_count(&c.segment),
                    ((size_t)c.segment.numel + 3) / 4);
    CHECK(gc_ternary_validate(payload, &c.segment, 1) == GC_OK);
    ON_EVERY_TIER(gc_nearest_encode(src, c.dtype, &c.segment, 1, step, in, out, NULL, decay, NULL,
                                    payload, &flag),
                  OUTPUT, residual, residual_nbytes, c.where,
                  memcpy(residual, before, residual_nbytes));
    for (size_t i = 0; i < c.residual_numel; i++)
        if (mode == 3 || i < c.segment.residual || i >= c.segment.residual + c.segment.numel)
            CHECK(memcmp(&residual[i], &before[i], 4) == 0);
}

static void test_entropy_encode(test_case c)
{
    uint32_t stream_nbytes = random_stream_nbytes();
    size_t code_nbytes = make_streams(&c, stream_nbytes);
    const void *src = make_source(&c, TENSOR);
    float decay = random_below(2) ? 1.0f : 0.25f;
    size_t nbytes = place_codes(&c, 1, code_nbytes), residual_nbytes = 4 * c.residual_numel;
    if (random_below(4) == 0) /* groups whose gradient is zero, with a residual */
        memset((uint8_t *)src + c.segment.data * size_of(c.dtype), 0,
               c.segment.numel / 2 * size_of(c.dtype));
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    float *before = guarded(RESIDUAL, residual_nbytes, c.where, 0);
    float *residual = guarded(OUTPUT, residual_nbytes, c.where, 0);
    fill_tensor(before, GC_F32, c.residual_numel, random_below(4) ? NORMAL : c.kind);
    int mode = (int)random_below(4); /* no residual, separate planes, in place, none kept */
    const float *in = mode == 0 ? NULL : mode == 2 ? residual : before;
    float *out = mode == 3 ? NULL : residual;
    /* Both outputs are compared: the payload here, the residual in the second run. */
    ON_EVERY_TIER(gc_entropy_encode(src, c.dtype, &c.segment, 1, stream_nbytes, in, out, NULL,
                                    decay, NULL, payload, &flag),
                  PAYLOAD, payload, nbytes, c.where,
                  (memset(payload, CANARY, nbytes), memcpy(residual, before, residual_nbytes)));
    check_untouched(payload, nbytes, &c.segment, 4 * (size_t)group_count(&c.segment), code_nbytes);
    /* a stream that does not fit would keep the canary, which is no table */
    CHECK(gc_entropy_validate(payload, stream_nbytes, &c.segment, 1) == GC_OK);
    ON_EVERY_TIER(gc_entropy_encode(src, c.dtype, &c.segment, 1, stream_nbytes, in, out, NULL,
                                    decay, NULL, payload, &flag),
                  OUTPUT, residual, residual_nbytes, c.where,
                  memcpy(residual, before, residual_nbytes));
    for (size_t i = 0; i < c.residual_numel; i++)
        if (mode == 3 || i < c.segment.residual || i >= c.segment.residual + c.segment.numel)
            CHECK(memcmp(&residual[i], &before[i], 4) == 0);
}

static void test_values(test_case c)
{
    const void *src = make_source(&c, TENSOR);
    int value_dtype = random_below(2) ? GC_F32 : GC_BF16;
    size_t nbytes = place(&c, 0, 8 * (uint32_t)size_of(value_dtype));
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    ON_EVERY_TIER(gc_values_encode(src, c.dtype, &c.segment, 1, value_dtype, payload, &flag),
                  PAYLOAD, payload, nbytes, c.where, memset(payload, CANARY, nbytes));
    check_untouched(payload, nbytes, &c.segment, 0, c.segment.numel * size_of(value_dtype));
}

/* ---- decoders -------------------------------------------------------------------------------- */
/* Payloads of random bytes; ternary codes are made valid unless `hostile`. */
static void make_payloads(const test_case *c, size_t count, size_t nbytes,
                          uint32_t scales_per_group, int ternary, int hostile,
                          const uint8_t **payloads)
{
    size_t distinct = count < 30 ? count : 30;
    for (size_t p = 0; p < distinct; p++) {
        uint8_t *payload = guarded(PAYLOAD + (int)p, nbytes, c->where, 0);
        for (size_t i = 0; i < nbytes; i++)
            payload[i] = (uint8_t)random_u64();
        for (size_t i = 0; ternary && !hostile && i < nbytes; i++) /* 11 becomes 01 */
            payload[i] &= (uint8_t)~((payload[i] << 1) & payload[i] & 0xAA);
        put_scales(payload, c, scales_per_group, random_below(4) ? NORMAL : c->kind,
                   random_below(3) != 0);
        payloads[p] = payload;
    }
    for (size_t p = distinct; p < count; p++)
        payloads[p] = payloads[p % distinct];
}

static size_t random_payload_count(uint32_t numel)
{
    static const size_t counts[] = {1, 1, 1,  2,  2,  3,  4,  4,   5,   6,  7,
                                    8, 9, 12, 20, 31, 63, 64, 127, 128, 150};
    return counts[random_below(numel > 1500 ? 13 : sizeof counts / sizeof counts[0])];
}

static void check_outside(const test_case *c, const uint8_t *out)
{
    size_t size = size_of(c->out_dtype);
    for (size_t i = 0; i < c->tensor_numel * size; i++)
        if (i / size < c->segment.data || i / size >= c->segment.data + c->segment.numel)
            CHECK(out[i] == CANARY);
}

typedef enum {
    TERNARY_OWN,
    TERNARY_SHARED,
    ONEBIT,
    BLOCK2,
    BLOCK4,
    BLOCK8,
    VALUES_F32,
    VALUES_BF16,
    DECODER_COUNT
} decoder;

static void test_sum_decode(test_case c, decoder which, int hostile)
{
    static const uint32_t bits[] = {2, 2, 1, 2, 4, 8, 32, 16}, scales[] = {1, 1, 2, 1, 1, 1, 0, 0};
    const uint8_t *payloads[MAX_PAYLOADS_HERE];
    size_t count = random_payload_count(c.segment.numel),
           nbytes = place(&c, scales[which], bits[which]);
    if (c.kind == F16_EDGE || c.kind == BF16_EDGE)
        count = 1; /* an average would leave the edge */
    size_t out_nbytes = c.tensor_numel * size_of(c.out_dtype);
    make_payloads(&c, count, nbytes, scales[which], which <= TERNARY_SHARED, hostile, payloads);
    if (which == VALUES_F32 && c.kind != ANY_BITS)
        for (size_t p = 0; p < count && p < 30; p++)
            fill_tensor((uint8_t *)payloads[p] + c.segment.codes, GC_F32, c.segment.numel, c.kind);
    uint8_t *out = guarded(OUTPUT, out_nbytes, c.where, CANARY);
#define DECODE                                                                                    \
    (which <= TERNARY_SHARED                                                                      \
         ? gc_ternary_sum_decode(payloads, count, which == TERNARY_SHARED, &c.segment, 1, out,    \
                                 c.out_dtype, c.flags, &flag)                                     \
     : which == ONEBIT                                                                            \
         ? gc_onebit_sum_decode(payloads, count, &c.segment, 1, out, c.out_dtype, c.flags, &flag) \
     : which <= BLOCK8                                                                            \
         ? gc_block_sum_decode(payloads, count, bits[which], &c.segment, 1, out, c.out_dtype,     \
                               c.flags, &flag)                                                    \
         : gc_values_sum_decode(payloads, count, which == VALUES_F32 ? GC_F32 : GC_BF16,          \
                                &c.segment, 1, out, c.out_dtype, c.flags, &flag))
    if (!hostile) {
        ON_EVERY_TIER(DECODE, OUTPUT, out, out_nbytes, c.where, memset(out, CANARY, out_nbytes));
        check_outside(&c, out);
        return;
    }
    for (int tier = 0; tier < gc_tier_count();
         tier++) { /* values are unspecified: what counts is which bytes are touched */
        uint32_t flag = 0;
        memset(out, CANARY, out_nbytes);
        CHECK(!gc_tier_supported(tier) || (gc_tier_select(tier) == GC_OK && DECODE == GC_OK));
        check_outside(&c, out);
    }
#undef DECODE
}

/* Any bytes decode to the same values on every tier; those of a table that does not exist are
 * found. */
static void test_entropy_decode(test_case c)
{
    const uint8_t *payloads[MAX_PAYLOADS_HERE];
    uint32_t stream_nbytes = random_stream_nbytes();
    size_t code_nbytes = make_streams(&c, stream_nbytes),
           count = random_payload_count(c.segment.numel), nbytes = place_codes(&c, 1, code_nbytes),
           out_nbytes = c.tensor_numel * size_of(c.out_dtype);
    make_payloads(&c, count, nbytes, 1, 0, 1, payloads);
    for (size_t p = 0; p < count && p < 30; p++) { /* long runs of one symbol, or of escapes */
        uint8_t *codes = (uint8_t *)payloads[p] + c.segment.codes;
        if (code_nbytes && random_below(3) == 0)
            memset(codes, random_below(2) ? (int)random_below(256) : 0, code_nbytes);
        gc_status wanted = GC_OK;
        size_t at = 0;
        for (uint32_t i = 0, numel; i < c.segment.numel; i += numel) {
            numel = stream_numel(&c.segment, i);
            wanted = codes[at] > 15 ? GC_FORBIDDEN_CODE : wanted;
            at += stream_nbytes_of(numel, stream_nbytes);
        }
        CHECK(gc_entropy_validate(payloads[p], stream_nbytes, &c.segment, 1) == wanted);
    }
    uint8_t *out = guarded(OUTPUT, out_nbytes, c.where, CANARY);
    ON_EVERY_TIER(gc_entropy_sum_decode(payloads, count, stream_nbytes, &c.segment, 1, out,
                                        c.out_dtype, c.flags, &flag),
                  OUTPUT, out, out_nbytes, c.where, memset(out, CANARY, out_nbytes));
    check_outside(&c, out);
}

static unsigned bits_of_lanes(size_t count)
{
    unsigned bits = 0;
    while (((size_t)1 << bits) < 2 * count + 1)
        bits++;
    return bits;
}

static void test_lanes(test_case c)
{
    int hostile = random_below(4) == 0;
    const uint8_t *payloads[MAX_PAYLOADS_HERE];
    size_t count = random_payload_count(c.segment.numel), nbytes = place(&c, 1, 2);
    unsigned lane_bits = bits_of_lanes(count);
    make_payloads(&c, count, nbytes, 1, 1, hostile, payloads);
    test_case lanes = c;
    size_t lanes_nbytes = place(&lanes, 1, lane_bits),
           code_nbytes = ((size_t)c.segment.numel * lane_bits + 7) / 8;
    uint8_t *out = guarded(RESIDUAL, lanes_nbytes, c.where, CANARY);
    ON_EVERY_TIER(
        gc_ternary_sum_lanes(payloads, count, &c.segment, &lanes.segment, 1, lane_bits, out),
        RESIDUAL, out, lanes_nbytes, c.where, ((void)flag, memset(out, CANARY, lanes_nbytes)));
    check_untouched(out, lanes_nbytes, &lanes.segment, 0, code_nbytes);
    if (!hostile)
        for (int tier = 0; tier < gc_tier_count(); tier++)
            CHECK(gc_tier_select(tier) != GC_OK ||
                  gc_lanes_validate(out, count, lane_bits, &lanes.segment, 1) == GC_OK);

    /* Decode other world sizes than can be summed here, too. */
    if (random_below(3) == 0)
        count = 1 + random_below(32767);
    lane_bits = bits_of_lanes(count);
    lanes_nbytes = place(&lanes, 1, lane_bits);
    uint8_t *payload = guarded(PAYLOAD, lanes_nbytes, c.where, 0);
    for (size_t i = 0; i < lanes_nbytes; i++)
        payload[i] = (uint8_t)random_u64();
    put_scales(payload, &lanes, 1, random_below(4) ? NORMAL : c.kind, 1);
    size_t out_nbytes = c.tensor_numel * size_of(c.out_dtype);
    uint8_t *tensor = guarded(OUTPUT, out_nbytes, c.where, CANARY);
    ON_EVERY_TIER(gc_lanes_decode(payload, count, lane_bits, &lanes.segment, 1, tensor, c.out_dtype,
                                  c.flags, &flag),
                  OUTPUT, tensor, out_nbytes, c.where, memset(tensor, CANARY, out_nbytes));
    check_outside(&c, tensor);
}

/* ---- there and back -------------------------------------------------------------------------- */
/* What an encoder leaves out of its payload is in its residual: x + r - q, to the bit. */
static void test_round_trip(test_case c)
{
    static const uint32_t bits[] = {1, 2, 4, 8, 2}, scales[] = {2, 1, 1, 1, 1};
    enum { NEAREST = 4, ENTROPY = 5 };
    uint32_t which = random_below(6), stream_nbytes = random_stream_nbytes();
    size_t nbytes = which == ENTROPY ? place_codes(&c, 1, make_streams(&c, stream_nbytes))
                                     : place(&c, scales[which], bits[which]);
    c.dtype = c.out_dtype = GC_F32;
    const float *src = make_source(&c, TENSOR);
    float *before = guarded(RESIDUAL, 4 * c.residual_numel, c.where, 0);
    float *after = guarded(EXPECTED + 1, 4 * c.residual_numel, c.where, 0);
    fill_tensor(before, GC_F32, c.residual_numel, random_below(4) ? NORMAL : c.kind);
    uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY);
    float *out = guarded(OUTPUT, 4 * c.tensor_numel, c.where, CANARY);
    const uint8_t *payloads[] = {payload};
    const gc_segment *s = &c.segment;
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        uint32_t flag = 0;
        CHECK((which == 0 ? gc_onebit_encode(src, GC_F32, s, 1, before, after, NULL, 1.0f, NULL,
                                             NULL, payload, &flag)
               : which == NEAREST ? gc_nearest_encode(src, GC_F32, s, 1, 1.8, before, after, NULL,
                                                      1.0f, NULL, payload, &flag)
               : which == ENTROPY ? gc_entropy_encode(src, GC_F32, s, 1, stream_nbytes, before,
                                                      after, NULL, 1.0f, NULL, payload, &flag)
                                  : gc_block_encode(src, GC_F32, s, 1, bits[which], before, after,
                                                    NULL, 1.0f, NULL, payload, &flag)) == GC_OK);
        CHECK((which == 0 ? gc_onebit_sum_decode(payloads, 1, s, 1, out, GC_F32, 0, &flag)
               : which == NEAREST
                   ? gc_ternary_sum_decode(payloads, 1, 0, s, 1, out, GC_F32, 0, &flag)
               : which == ENTROPY
                   ? gc_entropy_sum_decode(payloads, 1, stream_nbytes, s, 1, out, GC_F32, 0, &flag)
                   : gc_block_sum_decode(payloads, 1, bits[which], s, 1, out, GC_F32, 0, &flag)) ==
              GC_OK);
        for (uint32_t i = 0; i < s->numel; i++) {
            float x = src[s->data + i] + before[s->residual + i], left = x - out[s->data + i];
            float kept = after[s->residual + i];
            CHECK(kept == left || (kept != kept && left != left));
        }
    }
}

/* ---- checks of codes ------------------------------------------------------------------------- */
/* What each validator must say, worked out bit by bit. */
static gc_status slow_check(const uint8_t *codes, uint32_t numel, unsigned bits, uint32_t largest,
                            uint32_t padding)
{
    size_t total = ((size_t)numel * bits + 7) / 8 * 8, i = 0;
    for (uint32_t e = 0; e < numel; e++) {
        uint32_t value = 0;
        for (unsigned b = 0; b < bits; b++, i++)
            value |= (uint32_t)(codes[i / 8] >> i % 8 & 1) << b;
        if (value > largest)
            return bits == 2 && padding ? GC_FORBIDDEN_CODE : GC_LANE_RANGE;
    }
    for (; i < total; i++)
        if ((codes[i / 8] >> i % 8 & 1) != (padding >> i % 2 & 1))
            return GC_BAD_PADDING;
    return GC_OK;
}

static void test_validate(test_case c)
{
    size_t count = 1 + random_below(random_below(2) ? 8 : 32767);
    unsigned lane_bits = bits_of_lanes(count), bits[] = {2, 1, lane_bits, 2, 4, 8};
    uint32_t largest[] = {2, 1, (uint32_t)(2 * count), 3, 14, 254};
    for (int which = 0; which < 6; which++) {
        size_t nbytes = place(&c, 0, bits[which]),
               code_nbytes = ((size_t)c.segment.numel * bits[which] + 7) / 8;
        uint8_t *payload = guarded(PAYLOAD, nbytes, c.where, CANARY),
                *codes = payload + c.segment.codes;
        memset(codes, which == 0 ? 0x55 : 0, code_nbytes);
        unsigned used = (unsigned)((size_t)c.segment.numel * bits[which] % 8);
        for (int round = 0; round < 6; round++) { /* as it is, then with more and more wrong bits */
            gc_status expected = slow_check(codes, c.segment.numel, bits[which], largest[which],
                                            which == 0);
            for (int tier = 0; tier < gc_tier_count(); tier++) {
                if (gc_tier_select(tier) != GC_OK)
                    continue;
                CHECK((which == 0   ? gc_ternary_validate(payload, &c.segment, 1)
                       : which == 1 ? gc_onebit_validate(payload, &c.segment, 1)
                       : which == 2 ? gc_lanes_validate(payload, count, lane_bits, &c.segment, 1)
                                    : gc_block_validate(payload, bits[which], &c.segment, 1)) ==
                      (which > 2 && expected == GC_LANE_RANGE ? GC_FORBIDDEN_CODE : expected));
            }
            if (round == 0 && used) /* padding */
                codes[code_nbytes - 1] ^= (uint8_t)(1u << (used + random_below(8 - used)));
            else if (code_nbytes)
                codes[random_below((uint32_t)code_nbytes)] = (uint8_t)random_u64();
        }
    }
}

/* Many small segments in one table give what each gives alone. */
static void test_tables(void)
{
    enum { ROWS = 9 };
    gc_segment rows[ROWS];
    uint64_t data = 0, nbytes = 0;
    for (int s = 0; s < ROWS; s++) {
        gc_segment row = {data,
                          data,
                          0,
                          nbytes,
                          0,
                          8 * random_below(30),
                          random_below(300),
                          1 + random_below(200),
                          (uint32_t)s};
        row.codes = row.scales + 8 * (uint64_t)group_count(&row);
        nbytes = row.codes + (row.numel + 3) / 4;
        data += row.numel + random_below(3);
        rows[s] = row;
    }
    snprintf(case_name, sizeof case_name, "table of %d rows, %u elements", ROWS, (unsigned)data);
    float *src = guarded(TENSOR, 4 * data, AT_END, 0), *out = guarded(OUTPUT, 4 * data, AT_END, 0);
    float *alone = guarded(RESIDUAL, 4 * data, AT_END, 0);
    fill_tensor(src, GC_F32, data, NORMAL);
    uint8_t *whole = guarded(PAYLOAD, nbytes, AT_END, 0),
            *parts = guarded(PAYLOAD + 1, nbytes, AT_END, 0);
    uint32_t flag = 0;
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        memset(out, 0, 4 * data);
        memset(alone, 0, 4 * data);
        CHECK(gc_onebit_encode(src, GC_F32, rows, ROWS, NULL, NULL, NULL, 1.0f, NULL, NULL, whole,
                               &flag) == GC_OK);
        CHECK(gc_onebit_sum_decode((const uint8_t *const[]){whole}, 1, rows, ROWS, out, GC_F32, 0,
                                   &flag) == GC_OK);
        for (int s = ROWS - 1; s >= 0; s--) {
            CHECK(gc_onebit_encode(src, GC_F32, &rows[s], 1, NULL, NULL, NULL, 1.0f, NULL, NULL,
                                   parts, &flag) == GC_OK);
            CHECK(gc_onebit_sum_decode((const uint8_t *const[]){parts}, 1, &rows[s], 1, alone,
                                       GC_F32, GC_STREAM, &flag) == GC_OK);
        }
        CHECK(memcmp(whole, parts, nbytes) == 0 && memcmp(out, alone, 4 * data) == 0 && flag == 0);
    }
}

static void test_decode(test_case c)
{
    test_sum_decode(c, (decoder)random_below(DECODER_COUNT), 0);
}
static void test_own_scales(test_case c) { test_sum_decode(c, TERNARY_OWN, 0); }
static void test_shared_scales(test_case c) { test_sum_decode(c, TERNARY_SHARED, 0); }
static void test_hostile(test_case c)
{
    test_sum_decode(c, (decoder)random_below(DECODER_COUNT), 1);
}

static void (*const tests[])(test_case) = {
    test_block_sums,     test_ternary_encode, test_onebit_encode,  test_block_encode,
    test_nearest_encode, test_entropy_encode, test_entropy_decode, test_values,
    test_decode,         test_own_scales,     test_shared_scales,  test_hostile,
    test_lanes,          test_round_trip,     test_validate,
};
enum { TEST_COUNT = sizeof tests / sizeof tests[0] };

static void run_case(uint32_t numel)
{
    for (int i = 0; i < TEST_COUNT; i++)
        tests[i](make_case(numel));
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 12;
    if (argc > 2)
        random_seed(strtoull(argv[2], NULL, 0));
    for (int round = 0; round < rounds; round++) {
        for (uint32_t numel = 0; numel <= 130; numel++)
            run_case(numel);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            run_case(lengths[i]);
        for (int i = 0; i < 20; i++)
            run_case(random_below(random_below(2) ? 3000 : 14000));
        for (int i = 0; i < 20; i++)
            test_tables();
    }
    puts("test_tiers: ok");
    return 0;
}
