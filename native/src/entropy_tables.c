/* entropy_tables.c - the static Huffman codes of pairs: lengths by package-merge (Larmore and
 * Hirschberg 1990), canonical codes. */
#include <stdatomic.h>

#include "entropy.h"

enum { MOST_SYMBOLS = (2 * GC_TABLE_TOP + 1) * (2 * GC_TABLE_TOP + 1) + 1, TOTAL = 1 << 14 };

/* How often a code is 0, 1, ... 7, in 1/2^14, and -1, ... -7 as often; 0: it has no symbols. What
 * is missing from 1 is left to the escape symbol. */
typedef uint16_t distribution[GC_TABLE_TOP + 1];

/* Codes of normal, Laplace and t distributions (3 degrees of freedom) and of generalized normal
 * ones (of the shape given), at steps of 2^s root mean squares: the sixteen, of 215, that coded
 * streams best at 1 to 3.5 bits: gradients of three models, normal and Laplace numbers. */
static const distribution distributions[GC_TABLE_COUNT] = {
    /* normal, s = -0.375, 0.125, 0.375 */
    {4918, 3706, 1585, 384, 53, 0, 0, 0},
    {6790, 3962, 782, 51, 0, 0, 0, 0},
    {7917, 3809, 414, 10, 0, 0, 0, 0},
    /* shape 1.4, s = -1.125, -0.625, 0.125, 0.75, 2.875 */
    {3602, 2804, 1738, 961, 487, 229, 101, 42},
    {4951, 3318, 1534, 589, 196, 58, 15, 0},
    {7713, 3492, 727, 103, 11, 0, 0, 0},
    {10585, 2728, 165, 0, 0, 0, 0, 0},
    {16351, 16, 0, 0, 0, 0, 0, 0},
    /* Laplace, s = -1.375, -0.375, 0.5, 1.5 */
    {3908, 2622, 1520, 881, 511, 296, 172, 99},
    {6885, 3153, 1060, 356, 120, 40, 0, 0},
    {10355, 2606, 353, 48, 0, 0, 0, 0},
    {14167, 1088, 20, 0, 0, 0, 0, 0},
    /* t, s = -0.875 */
    {5423, 3420, 1247, 440, 178, 82, 42, 24},
    /* shape 0.5, s = -2, -1.25, -0.25 */
    {5351, 2248, 1102, 646, 413, 279, 196, 141},
    {7341, 2374, 936, 468, 262, 157, 99, 65},
    {10354, 2074, 548, 204, 90, 44, 0, 0},
};

/* A symbol: a pair, or the escape. */
typedef struct {
    uint32_t weight;
    uint16_t number; /* in the order of a, then b, the escape last */
    uint8_t index;   /* of gc_entropy_table.symbols; 0: the escape */
    uint8_t length;
} symbol;

static uint32_t symbols_of(const distribution from, symbol *symbols)
{
    uint32_t count = 0, rest = TOTAL * TOTAL;
    for (int a = -GC_TABLE_TOP; a <= GC_TABLE_TOP; a++)
        for (int b = -GC_TABLE_TOP; b <= GC_TABLE_TOP; b++) {
            uint32_t weight = (uint32_t)from[a < 0 ? -a : a] * from[b < 0 ? -b : b];
            if (!weight)
                continue;
            symbols[count] = (symbol){weight, (uint16_t)count, gc_pair_index(a, b), 0};
            rest -= weight;
            count++;
        }
    symbols[count] = (symbol){rest, (uint16_t)count, 0, 0};
    return count + 1;
}

/* Insertion sort by weight, then number. */
static void sort(symbol *symbols, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        symbol one = symbols[i];
        uint32_t at = i;
        for (; at > 0 && symbols[at - 1].weight > one.weight; at--)
            symbols[at] = symbols[at - 1];
        symbols[at] = one;
    }
}

/* Lengths of at most GC_CODE_NBITS bits for sorted symbols: at every level, symbols and the
 * packages of two from the level below, by weight, symbols first. */
static void find_lengths(symbol *symbols, uint32_t count)
{
    static uint32_t weights[2][2 * MOST_SYMBOLS];
    static uint8_t is_symbol[GC_CODE_NBITS][2 * MOST_SYMBOLS];
    uint32_t size = 0;
    for (int level = 0; level < GC_CODE_NBITS; level++) {
        uint32_t *into = weights[level & 1], *from = weights[~level & 1];
        uint32_t packages = size / 2, next = 0, packed = 0;
        for (size = 0; next < count || packed < packages; size++) {
            uint32_t both = packed < packages ? from[2 * packed] + from[2 * packed + 1]
                                              : UINT32_MAX;
            int takes = next < count && symbols[next].weight <= both;
            is_symbol[level][size] = (uint8_t)takes;
            into[size] = takes ? symbols[next].weight : both;
            next += (uint32_t)takes;
            packed += (uint32_t)!takes;
        }
    }
    uint32_t wanted = 2 * count - 2;
    for (int level = GC_CODE_NBITS - 1; level >= 0; level--) {
        uint32_t taken = 0;
        for (uint32_t i = 0; i < wanted; i++)
            taken += is_symbol[level][i];
        for (uint32_t i = 0; i < taken; i++)
            symbols[i].length++;
        wanted = 2 * (wanted - taken);
    }
}

static uint32_t reversed(uint32_t code, unsigned length)
{
    uint32_t out = 0;
    for (unsigned bit = 0; bit < length; bit++)
        out |= (code >> bit & 1) << (length - 1 - bit);
    return out;
}

/* Bits of a code behind an escape symbol; of 8 and more as of 8 to 15. */
static uint32_t escaped_bits(int k) { return 4u + (k > 0) + (k > 1) + (k > 3) + (k > 7); }

static uint32_t pair_bits(const gc_entropy_table *table, int a, int b)
{
    uint32_t bits = (uint8_t)table->symbols[gc_pair_index(a, b)];
    int far = a < 0 ? -a : a, other = b < 0 ? -b : b;
    if (far > table->top || other > table->top)
        bits += escaped_bits(far) + escaped_bits(other);
    return bits;
}

static void set_costs(const distribution from, gc_entropy_table *table,
                      uint32_t (*costs)[GC_TABLE_COUNT])
{
    uint32_t rest = TOTAL, often[GC_COUNTED_CODES] = {0}; /* of both signs; beyond the last: rest */
    uint64_t all = 0, rows[GC_COUNTED_CODES];
    for (int k = 0; k <= table->top; k++) {
        often[k] = k ? 2u * from[k] : from[k];
        rest -= often[k];
    }
    often[table->top + 1] = rest;
    for (int a = 0; a < GC_COUNTED_CODES; a++)
        for (int b = 0; b < GC_COUNTED_CODES; b++)
            table->pair_costs[a][b] = 16 * (pair_bits(table, a, b) + pair_bits(table, -a, b) +
                                            pair_bits(table, a, -b) + pair_bits(table, -a, -b));
    /* cost(a) = mean of pair_costs[a][b] over b, less half of the mean over both */
    for (int a = 0; a < GC_COUNTED_CODES; a++) {
        rows[a] = 0;
        for (int b = 0; b < GC_COUNTED_CODES; b++)
            rows[a] += (uint64_t)often[b] * table->pair_costs[a][b];
        all += often[a] * rows[a];
    }
    for (int a = 0; a < GC_COUNTED_CODES; a++)
        costs[a][0] = (uint32_t)((rows[a] - all / (2 * TOTAL)) / TOTAL);
}

static void set_quads(const distribution from, gc_entropy_table *table)
{
    enum { T = GC_QUAD_TOP, EACH = 2 * T + 1 };
    uint32_t above = 0;
    for (int k = T + 1; k <= GC_TABLE_TOP; k++)
        above += 2u * from[k];
    table->is_narrow = above < TOTAL / 40;
    for (int i = 0; i < GC_QUADS_COUNT; i++) {
        uint64_t first = table->symbols[gc_pair_index(i / (EACH * EACH * EACH) - T,
                                                      i / (EACH * EACH) % EACH - T)],
                 second = table->symbols[gc_pair_index(i / EACH % EACH - T, i % EACH - T)];
        uint32_t length = first & 63, more = second & 63;
        uint64_t bits = first >> (64 - length) | second >> (64 - more) << length;
        table->quads[i] = (uint32_t)bits << 7 | (length + more);
    }
}

/* Put a second symbol behind the first one where the bits hold it whole. */
static void add_second_symbols(gc_entropy_table *table)
{
    gc_look first[1 << GC_CODE_NBITS];
    memcpy(first, table->decode, sizeof first);
    for (uint32_t bits = 0; bits < 1u << GC_CODE_NBITS; bits++) {
        gc_look *look = &table->decode[bits];
        const gc_look *next = &first[bits >> look->bits];
        if (!look->numel || !next->numel || look->bits + next->bits > GC_CODE_NBITS)
            continue;
        look->codes[2] = next->codes[0];
        look->codes[3] = next->codes[1];
        look->bits += next->bits;
        look->numel = 4;
    }
}

static void make_table(const distribution from, gc_entropy_table *table,
                       uint32_t (*costs)[GC_TABLE_COUNT])
{
    symbol symbols[MOST_SYMBOLS], ordered[MOST_SYMBOLS];
    uint32_t count = symbols_of(from, symbols), next = 0;
    sort(symbols, count);
    find_lengths(symbols, count);
    while (table->top < GC_TABLE_TOP && from[table->top + 1])
        table->top++;
    for (uint32_t i = 0; i < count; i++)
        ordered[symbols[i].number] = symbols[i];
    for (unsigned length = 1; length <= GC_CODE_NBITS; length++)
        for (uint32_t i = 0; i < count; i++) {
            const symbol *one = &ordered[i];
            if (one->length != length)
                continue;
            uint32_t code = reversed(next >> (GC_CODE_NBITS - length), length);
            table->symbols[one->index] = (uint64_t)code << (64 - length) | length;
            gc_look look = {.first_bits = (uint8_t)length};
            if (one->index) {
                look.codes[0] = (int8_t)((one->index >> 4) - 8);
                look.codes[1] = (int8_t)((one->index & 15) - 8);
                look.bits = (uint8_t)length;
                look.numel = 2;
            }
            for (uint32_t bits = code; bits < 1u << GC_CODE_NBITS; bits += 1u << length)
                table->decode[bits] = look;
            next += 1u << (GC_CODE_NBITS - length);
        }
    add_second_symbols(table);
    for (uint32_t index = 0; index < GC_SYMBOLS_COUNT; index++) {
        if (!table->symbols[index])
            table->symbols[index] = table->symbols[0];
        uint64_t length = table->symbols[index] & 63, bits = table->symbols[index] >> (64 - length);
        table->joined[index] = (uint16_t)((bits & 0xFF) | length << 8 | bits >> 8 << 12);
    }
    set_quads(from, table);
    set_costs(from, table, costs);
}

const gc_entropy_tables *gc_get_entropy_tables(void)
{
    enum { ABSENT, UNDER_WAY, READY };
    static gc_entropy_tables all;
    static atomic_int state = ABSENT;
    if (atomic_load_explicit(&state, memory_order_acquire) == READY)
        return &all;
    int absent = ABSENT;
    if (atomic_compare_exchange_strong(&state, &absent, UNDER_WAY)) {
        for (int t = 0; t < GC_TABLE_COUNT; t++)
            make_table(distributions[t], &all.tables[t],
                       (uint32_t (*)[GC_TABLE_COUNT]) & all.costs[0][t]);
        atomic_store_explicit(&state, READY, memory_order_release);
    }
    while (atomic_load_explicit(&state, memory_order_acquire) != READY)
        ; /* another thread makes them: a millisecond */
    return &all;
}

size_t gc_streams_code_nbytes(uint32_t start, uint32_t numel, uint32_t stream_nbytes)
{
    uint64_t end = (uint64_t)start + numel, total = 0;
    uint32_t head = (GC_STREAM_NUMEL - start % GC_STREAM_NUMEL) % GC_STREAM_NUMEL;
    if (!numel)
        return 0;
    if (head >= numel)
        return gc_stream_code_nbytes(numel, stream_nbytes);
    if (head)
        total += gc_stream_code_nbytes(head, stream_nbytes);
    total += (numel - head) / GC_STREAM_NUMEL * (uint64_t)(stream_nbytes - 4);
    if (end % GC_STREAM_NUMEL)
        total += gc_stream_code_nbytes((uint32_t)(end % GC_STREAM_NUMEL), stream_nbytes);
    return total;
}
