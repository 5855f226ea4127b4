/* harness.c - see harness.h. */
#define _GNU_SOURCE
#include "harness.h"

#include <sys/mman.h>
#include <unistd.h>

char case_name[512] = "(none)";

static uint64_t state = 0x9E3779B97F4A7C15u;

static const uint8_t *given;
static size_t given_nbytes;

void random_seed(uint64_t seed) { state = seed * 2 + 1; }

void random_from(const uint8_t *data, size_t nbytes)
{
    random_seed(nbytes);
    given = data;
    given_nbytes = nbytes;
}

uint64_t random_u64(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    uint64_t number = state * 0x2545F4914F6CDD1Du;
    if (given_nbytes < 2)
        return number;
    uint64_t pair = given[0] | (uint64_t)given[1] << 8; /* callers use the highest or lowest bits */
    given += 2, given_nbytes -= 2;
    return (number & 0x0000FFFFFFFF0000u) | pair << 48 | pair;
}

uint32_t random_below(uint32_t bound)
{
    return bound ? (uint32_t)((random_u64() >> 32) * bound >> 32) : 0;
}

/* ---- buffers --------------------------------------------------------------------------------- */
enum { SLOT_NBYTES = 1 << 19 };

static uint8_t *slots[SLOT_COUNT];

void *guarded(int slot, size_t nbytes, placement where, uint8_t fill)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CHECK(slot >= 0 && slot < SLOT_COUNT && nbytes <= SLOT_NBYTES);
    if (!slots[slot]) {
        uint8_t *map = mmap(NULL, SLOT_NBYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0);
        CHECK(map != MAP_FAILED && mprotect(map + page, SLOT_NBYTES, PROT_READ | PROT_WRITE) == 0);
        slots[slot] = map + page;
    }
    return memset(slot_bytes(slot, nbytes, where), fill, nbytes);
}

void *slot_bytes(int slot, size_t nbytes, placement where)
{
    return where == AT_END ? slots[slot] + SLOT_NBYTES - nbytes : slots[slot];
}

/* ---- values ---------------------------------------------------------------------------------- */
static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

int is_finite_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits & 0x7FFFFFFF) < 0x7F800000;
}

static float bell(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)((double)(int64_t)random_u64() * 0x1p-63);
    return sum;
}

float random_value(value_kind kind)
{
    static const uint32_t odd[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
                                   0x7F800001, 0x7F7FFFFF, 0x80000000};
    /* Around 65520, the first value that is Inf in f16, and its counterpart in bf16. */
    static const uint32_t edges[2][4] = {{0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001},
                                         {0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001}};
    switch (kind) {
    case F16_EDGE:
    case BF16_EDGE: /* rare, so that a piece may hold only one */
        return random_below(300) ? bell()
                                 : float_of(edges[kind == BF16_EDGE][random_below(4)] |
                                            (uint32_t)random_below(2) << 31);
    case ZEROS:
        return random_below(2) ? 0.0f : -0.0f;
    case SPARSE:
        return random_below(8) ? 0 : bell();
    case TINY: /* around the smallest normal and in the subnormals */
        return bell() * float_of(random_below(0x01000000));
    case HUGE_VALUES:
        return bell() * 1e38f;
    case NONFINITE:
        return random_below(40) ? bell() : float_of(odd[random_below(7)]);
    case ANY_BITS:
        return float_of((uint32_t)random_u64());
    default:
        return bell();
    }
}

void fill_tensor(void *tensor, int dtype, size_t numel, value_kind kind)
{
    for (size_t i = 0; i < numel; i++) {
        float value = random_value(kind);
        if (dtype == GC_F32) {
            memcpy((uint8_t *)tensor + 4 * i, &value, 4);
        } else {
            /* Truncation does for bf16. For f16 any exponent of a bell curve, or any bits. */
            uint32_t bits;
            memcpy(&bits, &value, 4);
            uint16_t h = (uint16_t)(bits >> 16);
            if (dtype == GC_F16 && kind != ZEROS && kind != ANY_BITS && is_finite_bits(value) &&
                value != 0)
                h = (uint16_t)((bits >> 16 & 0x8000) |
                               random_below(kind == HUGE_VALUES ? 0x7C00 : 0x4400));
            memcpy((uint8_t *)tensor + 2 * i, &h, 2);
        }
    }
}
