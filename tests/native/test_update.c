/* test_update.c - weight updates: every tier gives the bytes of the portable tier, whatever the cut
 * into segments, and gradients straight from payloads give those of gradients that were decoded
 * first. What the portable tier must give is held by tests/test_update.py against the NumPy
 * reference.
 *
 * A parameter begins at a random element of buffers that end (or begin) at a page that may not be
 * touched. Its segments start anywhere: the addresses in its target are those of element 0, which
 * may lie before the buffer.
 */
#include "harness.h"

enum {
    CANARY = 0xA5,
    UPDATE_KINDS = GC_SQUARES + 1,
    VARIANTS = 32,
    MAX_SEGMENTS = 3,
    MAX_PAYLOADS_HERE = 9
};
/* what an update may write; each lies in the slot of its number */
enum { WEIGHT, TRAIL, STATE0, STATE1, PARTS };
/* other slots */
enum { BEFORE = 4, EXPECTED = 8, GRADIENT = 12, KEPT_GRADIENT = 13, NORMS = 14, PAYLOAD = 16 };
enum { STORED_F32, STORED_TRUNCATED, STORED_NEAREST, STORAGES };

static const uint32_t lengths[] = {255, 256, 1000, 2040, 2047, 2048, 2049, 2063, 4095, 4096, 4101};
static const uint32_t large_lengths[] = {65535, 65536, 65537, 65551};

/* ---- one parameter in memory ----------------------------------------------------------------- */
typedef struct {
    uint32_t start, numel;  /* elements of the parameter that are there */
    uint32_t before, after; /* elements around them, which no update may touch */
    int storage, dtype;     /* dtype: of the gradient */
    placement where;
    uint8_t *parts[PARTS]; /* NULL for the trail of an fp32 weight */
    void *gradient;        /* of element `start` */
    gc_target target;
} parameter;

static size_t size_of(int dtype) { return dtype == GC_F32 ? 4 : 2; }

static size_t part_size(const parameter *p, int part)
{
    return part == TRAIL || (part == WEIGHT && p->storage != STORED_F32) ? 2 : 4;
}

static size_t part_nbytes(const parameter *p, int part)
{
    return part_size(p, part) * (p->before + p->numel + p->after);
}

/* The address of element 0, given that of element `start`. */
static uint64_t element0(const parameter *p, const void *first, size_t size)
{
    return (uint64_t)(uintptr_t)first - (uint64_t)p->start * size;
}

static void fill_part(const parameter *p, int part, value_kind kind, int non_negative)
{
    uint8_t *first = p->parts[part] + p->before * part_size(p, part);
    if (part == TRAIL) {
        for (uint32_t i = 0; i < 2 * p->numel; i++)
            first[i] = (uint8_t)random_u64();
        return;
    }
    fill_tensor(first, part_size(p, part) == 4 ? GC_F32 : GC_BF16, p->numel, kind);
    for (uint32_t i = 0; non_negative && i < p->numel; i++)
        first[4 * i + 3] &= 0x7F;
}

static value_kind random_kind(void)
{
    return random_below(3) ? NORMAL : (value_kind)random_below(KIND_COUNT);
}

/* A parameter with random contents, of which BEFORE keeps a copy. */
static parameter make_parameter(uint32_t start, uint32_t numel, int storage, int dtype)
{
    parameter p = {.start = start, .numel = numel, .storage = storage, .dtype = dtype};
    p.where = random_below(2) ? AT_END : AT_START;
    p.before = p.where == AT_END ? random_below(9) : 0;
    p.after = p.where == AT_END ? 0 : random_below(9);
    value_kind kind = random_kind();
    /* sums of squares are not negative, but an update must not rely on it */
    int squares = random_below(8) != 0;
    for (int part = 0; part < PARTS; part++) {
        if (part == TRAIL && storage == STORED_F32)
            continue;
        p.parts[part] = guarded(part, part_nbytes(&p, part), p.where, CANARY);
        fill_part(&p, part, kind,
                  squares && (part == STATE1 || (part == STATE0 && random_below(2))));
        memcpy(guarded(BEFORE + part, part_nbytes(&p, part), p.where, 0), p.parts[part],
               part_nbytes(&p, part));
    }
    p.gradient = guarded(GRADIENT, size_of(dtype) * numel, p.where, 0);
    fill_tensor(p.gradient, dtype, numel, random_kind());
    uint64_t places[PARTS] = {0};
    for (int part = 0; part < PARTS; part++)
        if (p.parts[part])
            places[part] = element0(&p, p.parts[part] + p.before * part_size(&p, part),
                                    part_size(&p, part));
    p.target = (gc_target){.weight = places[WEIGHT],
                           .trail = places[TRAIL],
                           .state0 = places[STATE0],
                           .state1 = places[STATE1],
                           .gradient = element0(&p, p.gradient, size_of(dtype)),
                           .rule = 0,
                           .gradient_dtype = (uint32_t)dtype};
    snprintf(case_name, sizeof case_name, "start %u numel %u storage %d dtype %d %s", start, numel,
             storage, dtype, p.where == AT_END ? "at end" : "at start");
    return p;
}

static const uint8_t *copy_of(const parameter *p, int first_slot, int part)
{
    return slot_bytes(first_slot + part, part_nbytes(p, part), p->where);
}

static void restore(const parameter *p)
{
    for (int part = 0; part < PARTS; part++)
        if (p->parts[part])
            memcpy(p->parts[part], copy_of(p, BEFORE, part), part_nbytes(p, part));
}

static void keep_as_expected(const parameter *p)
{
    for (int part = 0; part < PARTS; part++)
        if (p->parts[part])
            memcpy(guarded(EXPECTED + part, part_nbytes(p, part), p->where, 0), p->parts[part],
                   part_nbytes(p, part));
}

/* Every part is byte for byte what is kept in the slots from `first_slot` on. */
static void check_parts(const parameter *p, int first_slot)
{
    for (int part = 0; part < PARTS; part++)
        CHECK(!p->parts[part] ||
              memcmp(p->parts[part], copy_of(p, first_slot, part), part_nbytes(p, part)) == 0);
}

/* What lies around the parameter, and the parts that a rule does not write, are as they were. */
static void check_untouched(const parameter *p, const gc_rule *rule)
{
    int moments = rule->kind >= GC_ADAMW && rule->kind <= GC_LAMB_START;
    int written[PARTS] = {0};
    written[WEIGHT] = written[TRAIL] = rule->kind <= GC_ADAMW || rule->kind == GC_LAMB_APPLY;
    written[STATE0] = moments || rule->kind == GC_ADAGRAD ||
                      (rule->kind == GC_SGD && rule->momentum != 0);
    written[STATE1] = moments;
    for (int part = 0; part < PARTS; part++) {
        if (!p->parts[part])
            continue;
        size_t size = part_size(p, part), first = p->before * size, end = first + p->numel * size;
        const uint8_t *old = copy_of(p, BEFORE, part);
        for (size_t i = 0; i < part_nbytes(p, part); i++)
            CHECK((written[part] && i >= first && i < end) || p->parts[part][i] == old[i]);
    }
}

static int adds_up(uint32_t kind)
{
    return kind == GC_LAMB_START || kind == GC_LAMB_NORMS || kind == GC_SQUARES;
}

/* Take away the addresses that a rule has no use for. */
static void forget_unused(gc_target *target, const gc_rule *rule)
{
    if (rule->kind == GC_LAMB_NORMS || rule->kind == GC_LAMB_APPLY)
        target->gradient = 0;
    if (rule->kind == GC_MOMENTS || rule->kind == GC_SQUARES)
        target->weight = target->trail = 0;
    if (rule->kind == GC_SQUARES || (rule->kind == GC_SGD && rule->momentum == 0))
        target->state0 = 0;
    if (rule->kind == GC_SQUARES || rule->kind == GC_SGD || rule->kind == GC_ADAGRAD)
        target->state1 = 0;
}

/* ---- rules ----------------------------------------------------------------------------------- */
/* Bits of `variant` switch what a rule of this kind can leave out. */
static gc_rule make_rule(uint32_t kind, int storage, uint32_t variant)
{
    int decays = variant >> 1 & 1, keeps_much = variant >> 2 & 1;
    uint32_t flags = (variant & 1 ? GC_MAXIMIZE : 0) | (variant >> 4 & 1 ? GC_NESTEROV : 0);
    flags |= variant >> 3 & 1 ? (kind == GC_SGD ? GC_FIRST : GC_PRESCALE) : 0;
    gc_rule rule = {.kind = kind,
                    .flags = flags,
                    .rounding = storage == STORED_NEAREST ? GC_NEAREST : GC_TRUNCATE};
    rule.step_size = random_below(8) ? -0.013f : 0.0f;
    rule.weight_decay = decays ? 0.01f : 0.0f;
    rule.decay = decays ? 0.999f : 1.0f;
    rule.momentum = keeps_much ? 0.9f : 0.0f; /* SGD alone */
    rule.keep = keeps_much ? (random_below(2) ? 0.7f : 0.5f) : 0.1f;
    rule.keep2 = 0.001f;
    rule.beta2 = 0.999f;
    rule.bias1 = 1.7f;
    rule.bias2 = 0.3f;
    rule.eps = random_below(4) ? 1e-8f : 0.0f;
    rule.prescale = 0.37f;
    size_t used = strlen(case_name);
    snprintf(case_name + used, sizeof case_name - used, " kind %u variant %u", kind, variant);
    return rule;
}

/* ---- segments -------------------------------------------------------------------------------- */
/* The whole parameter as at most MAX_SEGMENTS segments that begin at multiples of 8. */
static size_t cut(const parameter *p, gc_segment *segments, size_t most)
{
    uint32_t first = 0;
    size_t count = 0;
    while (count == 0 || first < p->numel) {
        uint32_t numel = p->numel - first, shorter = 8 * random_below(numel / 8 + 1);
        if (count + 1 < most && shorter)
            numel = shorter;
        segments[count++] = (gc_segment){.data = first,
                                         .start = p->start + first,
                                         .numel = numel,
                                         .group_numel = 1 + random_below(2 * numel + 1)};
        first += numel;
    }
    return count;
}

static gc_status update(const gc_gradients *gradients, const parameter *p,
                        const gc_segment *segments, size_t count, const gc_rule *rule,
                        double *norms, uint32_t *flag)
{
    return gc_update(gradients, segments, count, &p->target, 1, rule, 1, norms, flag);
}

static const gc_gradients from_tensors = {.from = GC_FROM_TENSORS};

/* ---- tiers ----------------------------------------------------------------------------------- */
/* Whole, on every tier: weights, state and norms are tier 0's. Cut into segments: weights and state
 * are. */
static void test_tiers(uint32_t kind, int storage, int dtype, uint32_t start, uint32_t numel,
                       uint32_t variant)
{
    parameter p = make_parameter(start, numel, storage, dtype);
    gc_rule rule = make_rule(kind, storage, variant);
    if (random_below(2))
        forget_unused(&p.target, &rule);
    gc_segment whole, pieces[MAX_SEGMENTS];
    cut(&p, &whole, 1);
    size_t count = cut(&p, pieces, MAX_SEGMENTS), gradient_nbytes = size_of(dtype) * numel;
    uint8_t *gradient = guarded(KEPT_GRADIENT, gradient_nbytes, AT_END, 0);
    memcpy(gradient, p.gradient, gradient_nbytes);
    double expected_norms[2] = {0};
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        uint32_t flag = 0;
        restore(&p);
        double *norms = guarded(NORMS, sizeof expected_norms, AT_END, CANARY);
        CHECK(update(&from_tensors, &p, &whole, 1, &rule, norms, &flag) == GC_OK && flag == 0);
        check_untouched(&p, &rule);
        if (!adds_up(kind) || !numel)
            CHECK(((uint8_t *)norms)[0] == CANARY && ((uint8_t *)norms)[15] == CANARY);
        if (tier == 0) {
            keep_as_expected(&p);
            memcpy(expected_norms, norms, sizeof expected_norms);
        }
        check_parts(&p, EXPECTED);
        CHECK(memcmp(norms, expected_norms, sizeof expected_norms) == 0);
        CHECK(memcmp(p.gradient, gradient, gradient_nbytes) == 0);

        restore(&p);
        norms = guarded(NORMS, count * sizeof expected_norms, AT_END, CANARY);
        CHECK(update(&from_tensors, &p, pieces, count, &rule, norms, &flag) == GC_OK && flag == 0);
        check_parts(&p, EXPECTED);
    }
}

/* ---- gradients from payloads ----------------------------------------------------------------- */
typedef enum {
    TERNARY_OWN,
    TERNARY_SHARED,
    ONEBIT,
    VALUES_F32,
    VALUES_BF16,
    LANES,
    BLOCK2,
    BLOCK8,
    ENTROPY,
    FORM_COUNT
} form_name;

static uint32_t group_count(const gc_segment *s)
{
    return s->numel ? (s->start + s->numel - 1) / s->group_numel - s->start / s->group_numel + 1
                    : 0;
}

enum { STREAM_NBYTES = 1126 };

/* Bytes of the codes of a segment whose groups are streams. */
static uint64_t streams_nbytes(const gc_segment *s)
{
    uint64_t nbytes = 0;
    for (uint32_t i = 0, numel; i < s->numel; i += numel) {
        numel = GC_STREAM_NUMEL - (s->start + i) % GC_STREAM_NUMEL;
        numel = numel < s->numel - i ? numel : s->numel - i;
        nbytes += numel == GC_STREAM_NUMEL ? STREAM_NBYTES - 4
                                           : (numel * STREAM_NBYTES + GC_STREAM_NUMEL - 1) /
                                                     GC_STREAM_NUMEL + 4;
    }
    return nbytes;
}

/* Give segments scales and codes at odd offsets of a payload; returns its size. `bits` 0: of
 * streams. */
static size_t place(gc_segment *segments, size_t count, uint32_t scales_per_group, unsigned bits)
{
    uint64_t nbytes = random_below(4);
    for (size_t s = 0; s < count; s++) {
        segments[s].scales = nbytes;
        segments[s].codes = nbytes + 4ull * scales_per_group * group_count(&segments[s]) +
                            random_below(3);
        nbytes = segments[s].codes + (bits ? ((uint64_t)segments[s].numel * bits + 7) / 8
                                           : streams_nbytes(&segments[s]));
    }
    return nbytes;
}

/* Random bytes with ternary codes made valid, and random scales (values, if there are none). */
static uint8_t *make_payload(int slot, size_t nbytes, form_name form, const gc_segment *segments,
                             size_t count, uint32_t scales_per_group, placement where)
{
    uint8_t *payload = guarded(slot, nbytes, where, 0);
    value_kind kind = random_kind();
    for (size_t i = 0; i < nbytes; i++)
        payload[i] = (uint8_t)random_u64();
    for (size_t i = 0; form <= TERNARY_SHARED && i < nbytes; i++) /* 11 becomes 01 */
        payload[i] &= (uint8_t)~((payload[i] << 1) & payload[i] & 0xAA);
    for (size_t s = 0; s < count; s++) {
        for (uint32_t g = 0; g < scales_per_group * group_count(&segments[s]); g++) {
            float scale = random_value(kind);
            memcpy(payload + segments[s].scales + 4 * g, &scale, 4);
        }
        if (form == VALUES_F32 || form == VALUES_BF16)
            fill_tensor(payload + segments[s].codes, form == VALUES_F32 ? GC_F32 : GC_BF16,
                        segments[s].numel, kind);
    }
    return payload;
}

static unsigned bits_of_lanes(size_t count)
{
    unsigned bits = 0;
    while (((size_t)1 << bits) < 2 * count + 1)
        bits++;
    return bits;
}

static gc_status decode(const gc_gradients *g, const gc_segment *segments, size_t count, void *out,
                        uint32_t *flag)
{
    switch (g->from) {
    case GC_FROM_TERNARY:
        return gc_ternary_sum_decode(g->payloads, g->payload_count, g->shared, segments, count, out,
                                     g->dtype, 0, flag);
    case GC_FROM_ONEBIT:
        return gc_onebit_sum_decode(g->payloads, g->payload_count, segments, count, out, g->dtype,
                                    0, flag);
    case GC_FROM_BLOCK:
        return gc_block_sum_decode(g->payloads, g->payload_count, g->code_bits, segments, count,
                                   out, g->dtype, 0, flag);
    case GC_FROM_ENTROPY:
        return gc_entropy_sum_decode(g->payloads, g->payload_count, g->stream_nbytes, segments,
                                     count, out, g->dtype, 0, flag);
    case GC_FROM_LANES:
        return gc_lanes_decode(g->payloads[0], g->world_size, g->lane_bits, segments, count, out,
                               g->dtype, 0, flag);
    default:
        return gc_values_sum_decode(g->payloads, g->payload_count, g->value_dtype, segments, count,
                                    out, g->dtype, 0, flag);
    }
}

/* Straight from payloads is decoded into the gradient's tensor and then updated from it, flag
 * included. */
static void test_payloads(uint32_t kind, int storage, int dtype, uint32_t start, uint32_t numel,
                          form_name form)
{
    static const uint32_t scales[] = {1, 1, 2, 0, 0, 1, 1, 1, 1};
    static const int from[] = {GC_FROM_TERNARY, GC_FROM_TERNARY, GC_FROM_ONEBIT,
                               GC_FROM_VALUES,  GC_FROM_VALUES,  GC_FROM_LANES,
                               GC_FROM_BLOCK,   GC_FROM_BLOCK,   GC_FROM_ENTROPY};
    parameter p = make_parameter(start, numel, storage, dtype);
    gc_rule rule = make_rule(kind, storage, random_below(VARIANTS));
    gc_segment segments[MAX_SEGMENTS];
    size_t count = cut(&p, segments, MAX_SEGMENTS),
           world = 1 + random_below(random_below(2) ? 8 : 32767);
    unsigned lane_bits = bits_of_lanes(world), bits[] = {2, 2, 1, 32, 16, lane_bits, 2, 8, 0};
    for (size_t s = 0; form == ENTROPY && s < count; s++)
        segments[s].group_numel = GC_STREAM_NUMEL;
    size_t nbytes = place(segments, count, scales[form], bits[form]);
    size_t payload_count = form == LANES ? 1 : 1 + random_below(MAX_PAYLOADS_HERE);
    const uint8_t *payloads[MAX_PAYLOADS_HERE];
    for (size_t k = 0; k < payload_count; k++)
        payloads[k] = make_payload(PAYLOAD + (int)k, nbytes, form, segments, count, scales[form],
                                   p.where);
    gc_gradients packed = {.payloads = payloads,
                           .payload_count = payload_count,
                           .world_size = world,
                           .from = from[form],
                           .dtype = dtype,
                           .shared = form == TERNARY_SHARED,
                           .value_dtype = form == VALUES_BF16 ? GC_BF16 : GC_F32,
                           .lane_bits = lane_bits,
                           .code_bits = form == BLOCK2 ? 2 : 8,
                           .stream_nbytes = STREAM_NBYTES};
    size_t used = strlen(case_name);
    snprintf(case_name + used, sizeof case_name - used, " form %d payloads %zu segments %zu", form,
             payload_count, count);
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        uint32_t expected_flag = 0, flag = 0;
        CHECK(decode(&packed, segments, count, p.gradient, &expected_flag) == GC_OK);
        restore(&p);
        CHECK(update(&from_tensors, &p, segments, count, &rule, NULL, &flag) == GC_OK && flag == 0);
        keep_as_expected(&p);
        restore(&p);
        parameter unread = p; /* no address and no dtype of a gradient */
        unread.target.gradient = 0;
        unread.target.gradient_dtype = 99;
        CHECK(update(&packed, &unread, segments, count, &rule, NULL, &flag) == GC_OK);
        CHECK(flag == (kind == GC_LAMB_APPLY ? 0 : expected_flag)); /* which reads no gradient */
        check_parts(&p, EXPECTED);
        check_untouched(&p, &rule);
    }
}

/* ---- split, join ----------------------------------------------------------------------------- */
static int is_nan_bits(uint32_t bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }

/* What the contract says of `w`, from its definition. */
static void check_split(uint32_t w, uint16_t top, uint16_t trail, uint32_t joined, int rounding)
{
    int keeps = rounding == GC_TRUNCATE || !is_nan_bits(w);
    CHECK(trail == (uint16_t)w);
    CHECK(joined == (keeps ? w : w | 0x00400000));
    CHECK(top == (rounding == GC_TRUNCATE ? w >> 16
                  : keeps                 ? (w + 0x8000) >> 16
                                          : w >> 16 | 0x0040));
}

static void split_and_join(const uint32_t *w, uint32_t numel, int rounding, placement where)
{
    uint16_t *top = guarded(1, 2 * numel, where, CANARY),
             *trail = guarded(2, 2 * numel, where, CANARY);
    uint32_t *joined = guarded(3, 4 * numel, where, CANARY);
    snprintf(case_name, sizeof case_name, "split %u numbers, rounding %d", numel, rounding);
    CHECK(gc_split(w, numel, rounding, top, trail) == GC_OK &&
          gc_join(top, trail, numel, rounding, joined) == GC_OK);
    for (uint32_t i = 0; i < numel; i++)
        check_split(w[i], top[i], trail[i], joined[i], rounding);
}

/* Every upper half with the trails around which something happens: all specials, ties and carries
 * are among them. */
static void test_split(void)
{
    static const uint32_t lows[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (int rounding = GC_TRUNCATE; rounding <= GC_NEAREST; rounding++) {
        for (size_t l = 0; l < sizeof lows / sizeof lows[0]; l++) {
            uint32_t *w = guarded(0, 4 * 65536, AT_END, 0);
            for (uint32_t high = 0; high < 65536; high++)
                w[high] = high << 16 | lows[l];
            split_and_join(w, 65536, rounding, AT_END);
        }
        for (uint32_t numel = 0; numel <= 130; numel++) {
            placement where = numel % 2 ? AT_END : AT_START;
            uint32_t *w = guarded(0, 4 * numel, where, 0);
            fill_tensor(w, GC_F32, numel, ANY_BITS);
            split_and_join(w, numel, rounding, where);
        }
    }
}

/* 1 - 2^-20 in both storages: the two differ in the top alone. */
static void test_known_step(void)
{
    for (uint32_t rounding = GC_TRUNCATE; rounding <= GC_NEAREST; rounding++) {
        uint16_t top = 0x3F80, trail = 0, gradient = 0x3F80;
        gc_rule rule = {.kind = GC_SGD, .rounding = rounding, .step_size = -0x1p-20f};
        gc_target target = {.weight = (uintptr_t)&top,
                            .trail = (uintptr_t)&trail,
                            .gradient = (uintptr_t)&gradient,
                            .gradient_dtype = GC_BF16};
        gc_segment one = {.numel = 1, .group_numel = 1};
        uint32_t flag = 0;
        CHECK(gc_update(&from_tensors, &one, 1, &target, 1, &rule, 1, NULL, &flag) == GC_OK);
        CHECK(top == (rounding == GC_NEAREST ? 0x3F80 : 0x3F7F) && trail == 0xFFF0 &&
              gradient == 0x3F80);
    }
}

/* ---- arguments ------------------------------------------------------------------------------- */
/* All that a call is given, so that a case can spoil one thing of it. The first segment is in order
 * in every case. */
typedef struct {
    gc_gradients gradients;
    const uint8_t *payloads[2];
    gc_segment segments[2];
    gc_target targets[2];
    gc_rule rules[2];
    double norms[4];
    uint32_t flag;
} call;

enum { CALL_NUMEL = 16 };

static float weights[2][CALL_NUMEL], states[4][CALL_NUMEL], gradient[CALL_NUMEL];
static uint8_t packed_bytes[256];

static call good_call(int from, uint32_t kind)
{
    call c = {.gradients = {.payload_count = from == GC_FROM_LANES ? 1 : 2,
                            .world_size = 2,
                            .from = from,
                            .value_dtype = GC_F32,
                            .lane_bits = 3},
              .payloads = {packed_bytes, packed_bytes}};
    for (uint32_t k = 0; k < 2; k++) {
        c.segments[k] = (gc_segment){
            .codes = 16, .numel = CALL_NUMEL, .group_numel = CALL_NUMEL, .parameter = k};
        c.targets[k] = (gc_target){.weight = (uintptr_t)weights[k],
                                   .gradient = (uintptr_t)gradient,
                                   .state0 = (uintptr_t)states[k],
                                   .state1 = (uintptr_t)states[2 + k],
                                   .rule = k};
        c.rules[k] = (gc_rule){
            .kind = kind, .step_size = -1, .momentum = 0.5f, .keep = 1, .eps = 1, .bias2 = 1};
    }
    return c;
}

static gc_status make_call(call *c)
{
    c->gradients.payloads = c->payloads;
    return gc_update(&c->gradients, c->segments, 2, c->targets, 2, c->rules, 2, c->norms, &c->flag);
}

static void test_arguments(void)
{
    float before[2][CALL_NUMEL];
    for (int i = 0; i < CALL_NUMEL; i++)
        weights[0][i] = weights[1][i] = gradient[i] = 1;
    memcpy(before, weights, sizeof weights);
    memset(states, 0, sizeof states);
    memset(packed_bytes, 0x55, sizeof packed_bytes);
    call c;
#define REFUSED(from, kind, spoil)                            \
    do {                                                      \
        c = good_call(from, kind);                            \
        spoil;                                                \
        CHECK(make_call(&c) == GC_INVALID_ARGUMENT);          \
        CHECK(c.norms[0] == 0 && c.norms[1] == 0 && !c.flag); \
    } while (0)
    REFUSED(-1, GC_SGD, (void)0);
    REFUSED(5, GC_SGD, (void)0);
    for (int from = GC_FROM_TENSORS; from <= GC_FROM_LANES; from++) {
        REFUSED(from, GC_SGD, c.segments[1].start = 4);
        REFUSED(from, GC_SGD, c.segments[1].group_numel = 0);
        REFUSED(from, GC_SGD, c.segments[1].start = 0xFFFFFFF8u);
        REFUSED(from, GC_SGD, c.segments[1].parameter = 2);
        REFUSED(from, GC_SGD, c.targets[1].rule = 2);
        REFUSED(from, GC_SGD, c.targets[1].weight = 0);
        REFUSED(from, GC_SGD, c.targets[1].state0 = 0);
        REFUSED(from, GC_ADAMW, c.targets[1].state1 = 0);
        REFUSED(from, GC_SQUARES + 1, (void)0);
        REFUSED(from, GC_SGD, c.rules[1].rounding = 2);
        if (from == GC_FROM_TENSORS)
            continue;
        REFUSED(from, GC_LAMB_START, (void)0);
        REFUSED(from, GC_LAMB_NORMS, (void)0);
        REFUSED(from, GC_SGD, c.gradients.payload_count = 0);
        REFUSED(from, GC_SGD, c.gradients.payload_count = 32768);
        REFUSED(from, GC_SGD, c.payloads[0] = NULL);
        REFUSED(from, GC_SGD, c.gradients.dtype = GC_F16);
        REFUSED(from, GC_SGD, c.gradients.value_dtype = GC_F16);
    }
    REFUSED(GC_FROM_TENSORS, GC_SGD, c.targets[1].gradient = 0);
    REFUSED(GC_FROM_TENSORS, GC_SGD, c.targets[1].gradient_dtype = GC_F16);
    REFUSED(GC_FROM_LANES, GC_SGD, c.gradients.payload_count = 2);
    REFUSED(GC_FROM_LANES, GC_SGD, c.gradients.lane_bits = 2);
    REFUSED(GC_FROM_LANES, GC_SGD, c.gradients.world_size = 0);
    REFUSED(GC_FROM_LANES, GC_SGD, c.gradients.world_size = ((size_t)1 << 32) + 2);
#undef REFUSED
    c = good_call(GC_FROM_TENSORS, GC_SQUARES);
#define REFUSED(...) CHECK(gc_update(__VA_ARGS__) == GC_INVALID_ARGUMENT)
    REFUSED(NULL, c.segments, 2, c.targets, 2, c.rules, 2, c.norms, &c.flag);
    REFUSED(&c.gradients, NULL, 2, c.targets, 2, c.rules, 2, c.norms, &c.flag);
    REFUSED(&c.gradients, c.segments, 2, NULL, 2, c.rules, 2, c.norms, &c.flag);
    REFUSED(&c.gradients, c.segments, 2, c.targets, 2, NULL, 2, c.norms, &c.flag);
    REFUSED(&c.gradients, c.segments, 2, c.targets, 2, c.rules, 2, NULL, &c.flag);
    REFUSED(&c.gradients, c.segments, 2, c.targets, 2, c.rules, 2, c.norms, NULL);
#undef REFUSED
    CHECK(c.norms[0] == 0 && c.flag == 0);

    uint32_t w[2] = {1, 2}, back[2] = {3, 4};
    uint16_t top[2] = {5, 6}, trail[2] = {7, 8};
#define REFUSED(call) CHECK((call) == GC_INVALID_ARGUMENT)
    REFUSED(gc_split(w, 2, 2, top, trail));
    REFUSED(gc_split(w, 2, -1, top, trail));
    REFUSED(gc_split(NULL, 2, 0, top, trail));
    REFUSED(gc_split(w, 2, 0, NULL, trail));
    REFUSED(gc_split(w, 2, 0, top, NULL));
    REFUSED(gc_join(top, trail, 2, 2, back));
    REFUSED(gc_join(NULL, trail, 2, 0, back));
    REFUSED(gc_join(top, NULL, 2, 0, back));
    REFUSED(gc_join(top, trail, 2, 0, NULL));
#undef REFUSED
    CHECK(top[0] == 5 && trail[0] == 7 && back[0] == 3);

    /* Nothing was written by any of these, and what is left out may be missing. */
    CHECK(memcmp(before, weights, sizeof weights) == 0);
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < CALL_NUMEL; i++)
            CHECK(states[k][i] == 0);
    CHECK(gc_update(&from_tensors, NULL, 0, NULL, 0, NULL, 0, NULL, &c.flag) == GC_OK);
    CHECK(gc_split(NULL, 0, 0, NULL, NULL) == GC_OK && gc_join(NULL, NULL, 0, 1, NULL) == GC_OK);
    c = good_call(GC_FROM_TENSORS, GC_SGD);
    c.targets[0] = (gc_target){.rule = GC_NO_RULE}; /* passed over: no addresses needed */
    c.segments[1].numel = 0;                        /* nothing to do: no parameter needed */
    c.segments[1].parameter = 7;
    CHECK(make_call(&c) == GC_OK && memcmp(before, weights, sizeof weights) == 0);
    c = good_call(GC_FROM_TENSORS, GC_SGD);
    c.rules[1].momentum = 0;
    c.targets[1].state0 = c.targets[1].state1 = 0;
    CHECK(make_call(&c) == GC_OK && weights[0][0] == 0 && weights[1][0] == 0);
}

/* ---- the floating-point environment ---------------------------------------------------------- */
#if defined(HAS_FLOAT_ENVIRONMENT)
/* Results do not depend on the caller's rounding mode or on flushing denormals, and these are as
 * they were. */
static void test_float_environment(void)
{
    for (uint32_t kind = 0; kind < UPDATE_KINDS; kind++) {
        parameter p = make_parameter(0, 77, STORED_NEAREST, GC_F32);
        gc_rule rule = make_rule(kind, STORED_NEAREST, 7);
        fill_tensor(p.gradient, GC_F32, 77, TINY);
        gc_segment whole;
        cut(&p, &whole, 1);
        double norms[2][2] = {{0}};
        for (int i = 0; i < 2; i++) {
            unsigned before = float_environment(), wanted = i ? FLOAT_ODD : FLOAT_DEFAULT;
            uint32_t flag = 0;
            restore(&p);
            set_float_environment(wanted);
            update(&from_tensors, &p, &whole, 1, &rule, norms[i], &flag);
            unsigned after = float_environment();
            set_float_environment(before);
            CHECK(((after ^ wanted) & FLOAT_MODES) == 0);
            if (i == 0)
                keep_as_expected(&p);
            check_parts(&p, EXPECTED);
        }
        CHECK(memcmp(norms[0], norms[1], sizeof norms[0]) == 0);
    }
}
#endif

/* ---- all of it ------------------------------------------------------------------------------- */
static uint32_t random_start(void) { return 8 * random_below(random_below(2) ? 12 : 4000); }

/* Every kind, storage and dtype, with one variant, or all of them. */
static void run_tiers(uint32_t numel, int all_variants)
{
    for (uint32_t kind = 0; kind < UPDATE_KINDS; kind++)
        for (int storage = 0; storage < STORAGES; storage++)
            for (int dtype = GC_F32; dtype <= GC_BF16; dtype++)
                for (uint32_t v = 0; v < (all_variants ? VARIANTS : 1); v++)
                    test_tiers(kind, storage, dtype, random_start(), numel,
                               all_variants ? v : random_below(VARIANTS));
}

/* Every form, storage and dtype, with one of the kinds that take payloads. */
static void run_payloads(uint32_t numel)
{
    static const uint32_t kinds[] = {GC_SGD,   GC_SGD,     GC_ADAGRAD,
                                     GC_ADAMW, GC_MOMENTS, GC_LAMB_APPLY};
    for (int form = 0; form < FORM_COUNT; form++)
        for (int storage = 0; storage < STORAGES; storage++)
            for (int dtype = GC_F32; dtype <= GC_BF16; dtype++)
                test_payloads(kinds[random_below(6)], storage, dtype, random_start(), numel,
                              (form_name)form);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 4;
    if (argc > 2)
        random_seed(strtoull(argv[2], NULL, 0));
    for (int tier = 0; tier < gc_tier_count(); tier++) {
        if (gc_tier_select(tier) != GC_OK)
            continue;
        test_known_step();
        test_arguments();
#if defined(HAS_FLOAT_ENVIRONMENT)
        test_float_environment();
#endif
    }
    test_split();
    for (int round = 0; round < rounds; round++) {
        for (uint32_t numel = 0; numel <= 130; numel++) {
            run_tiers(numel, numel == 37);
            run_payloads(numel);
        }
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            run_tiers(lengths[i], 0);
            run_payloads(lengths[i]);
        }
    }
    for (size_t i = 0; rounds > 1 && i < sizeof large_lengths / sizeof large_lengths[0]; i++) {
        run_tiers(large_lengths[i], 0);
        run_payloads(large_lengths[i]);
    }
    puts("test_update: ok");
    return 0;
}
