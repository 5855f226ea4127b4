/* entropy_encode.c - a stream of codes in a fixed number of bytes: the smallest step whose codes
 * fit, the table that codes them best, and its bits.
 *
 * What is chosen depends on counts of codes alone, which are integers, so every tier chooses alike.
 *
 * A search of one or two looks at all of the codes is a fifth faster, and can have a smaller error,
 * but the byte GPT of `bench accuracy` ended 0.01 to 0.03 nats higher with three variants of it. So
 * measure trainings, not errors, before this changes.
 */
#include "entropy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- the step -------------------------------------------------------------------------------- */
/* 2^(i / 32) */
static const double octave[32] = {
    1.0,
    1.0218971486541166,
    1.0442737824274138,
    1.0671404006768237,
    1.0905077326652577,
    1.1143867425958924,
    1.1387886347566916,
    1.1637248587775775,
    1.189207115002721,
    1.215247359980469,
    1.241857812073484,
    1.2690509571917332,
    1.2968395546510096,
    1.325236643159741,
    1.3542555469368927,
    1.383909881963832,
    1.4142135623730951,
    1.4451808069770467,
    1.476826145939499,
    1.5091644275934228,
    1.5422108254079407,
    1.5759808451078865,
    1.6104903319492543,
    1.645755478153965,
    1.681792830507429,
    1.718619298122478,
    1.7562521603732995,
    1.7947090750031072,
    1.8340080864093424,
    1.8741676341103,
    1.9152065613971474,
    1.9571441241754002,
};

enum {
    LAST_STEP = GC_STEP_COUNT - 1,
    MOST_LOOKS = 8,
    FAR = 16 /* steps, where none of those looked at fits */
};

/* Step j: 2^(j / 32 - 4) root mean squares, at most what lets every code stand for a finite
 * number. */
static float step_of(double rms, int j)
{
    double step = rms * octave[j % 32] * ((double)(1 << j / 32) / 16);
    return (float)(step < FLT_MAX / 32768 ? step : FLT_MAX / 32768);
}

typedef struct {
    const gc_entropy_encoder *tier;
    gc_entropy_stage *stage;
    const gc_entropy_tables *tables;
    double rms;
    uint32_t numel, code_nbytes;
} stream;

typedef struct {
    float scale;
    int table;
    int32_t size; /* of the codes, expected, in 1/64 bit */
} choice;

/* Step j for the first `sampled` elements of every GC_SAMPLE_EVERY: the table by what its codes
 * cost one by one, then what they cost in pairs, as if pairs were independent. */
static choice choice_at(const stream *of, int j, uint32_t sampled)
{
    uint32_t counts[GC_COUNTED_CODES], sums[16], total = 0;
    choice out = {step_of(of->rms, j), 0, 0};
    of->tier->count(of->stage, of->numel, sampled, 1.0f / out.scale, counts);
    of->tier->weigh(counts, of->tables->costs, sums);
    for (int t = 1; t < GC_TABLE_COUNT; t++)
        if (sums[t] < sums[out.table])
            out.table = t;
    of->tier->weigh(counts, of->tables->tables[out.table].pair_costs, sums);
    uint64_t size = 0;
    for (int k = 0; k < GC_COUNTED_CODES; k++) {
        size += (uint64_t)counts[k] * sums[k];
        total += counts[k];
    }
    out.size = (int32_t)(size / (2 * total));
    return out;
}

/* Search for the smallest step whose codes are expected to need at most `limit` (1/64 bit), from
 * step j on: return one that wastes less than `waste` steps, or the best of those that were looked
 * at. */
static int search(const stream *of, int32_t limit, int waste, int j, uint32_t sampled,
                  choice *found)
{
    int32_t share = GC_SAMPLE_EVERY / (int32_t)sampled;
    /* of the size, a step: 0.75 bit an octave */
    int32_t slope = (int32_t)of->numel / share * 3 / 2;
    limit /= share;
    int64_t excess = 0, spare = 0; /* at low and high */
    int low = -1, high = GC_STEP_COUNT;
    for (int looks = 0; looks < MOST_LOOKS; looks++) {
        choice now = choice_at(of, j, sampled);
        if (now.size > limit) {
            low = j;
            excess = now.size - limit;
        } else {
            high = j;
            spare = limit - now.size;
            *found = now;
            if (spare < waste * slope)
                break;
        }
        if (high == GC_STEP_COUNT)
            j = low + 1 + (int)(excess / slope);
        else if (low < 0)
            j = high - 1 - (int)(spare / slope);
        else
            j = high - (int)(spare * (high - low) / (spare + excess));
        if (j <= low || j >= high)
            j = low < 0 || high == GC_STEP_COUNT ? (low + high) / 2 : j <= low ? low + 1 : high - 1;
        if (j == low || j == high)
            break;
    }
    if (high < GC_STEP_COUNT)
        return high;
    j = low + FAR < LAST_STEP ? low + FAR : LAST_STEP;
    *found = choice_at(of, j, sampled);
    return j;
}

/* The step where a search begins: what suits the gradients that the tables were chosen by. */
static int first_step(uint32_t numel, uint32_t code_nbytes)
{
    int64_t centibits = (int64_t)code_nbytes * 800 / numel;
    int64_t j = 143 - (centibits - 160) * 35 / 100;
    return j < 0 ? 0 : j > LAST_STEP ? LAST_STEP : (int)j;
}

static int find_step(const stream *of, int32_t limit, choice *found)
{
    int j = first_step(of->numel, of->code_nbytes);
    if (of->numel == GC_STREAM_NUMEL)
        j = search(of, limit, 2, j, GC_SAMPLE_NUMEL, found);
    return search(of, limit, 1, j, GC_SAMPLE_EVERY, found);
}

/* ---- a stream -------------------------------------------------------------------------------- */
static void set_scale(gc_entropy_stage *stage, float scale, float inverse)
{
    stage->rest.scale = scale;
    stage->rest.inverse = inverse;
    stage->rest.is_written = 0;
}

/* Write the codes; 0 if they do not fit. */
static int put(const stream *of, const choice *with, uint8_t *codes, size_t *needed)
{
    const gc_entropy_table *table = &of->tables->tables[with->table];
    set_scale(of->stage, with->scale, 1.0f / with->scale);
    codes[0] = (uint8_t)with->table;
    return of->tier->put(of->stage, table, of->numel, of->code_nbytes, codes, needed);
}

/* Choose a step and write the codes; return the step, 0 where none fits: the largest are cut where
 * codes could overflow. */
static float encode_stream(const stream *of, uint8_t *codes)
{
    /* whole bytes waste seven bits at the most, twice */
    int32_t limit = ((int32_t)(8 * (of->code_nbytes - 1)) - 8) * 64;
    size_t needed;
    choice now;
    int j = find_step(of, limit, &now);
    int fits = put(of, &now, codes, &needed);
    /* Costs are those of independent codes. Where the codes of a stream are not, what it took says
     * how much more or less it needs. */
    int32_t spare = ((int32_t)of->code_nbytes - (int32_t)needed) * 8 * 64;
    if (!fits || spare > (int32_t)of->numel * 4) {
        int again = find_step(of, limit + now.size - (int32_t)(needed - 1) * 8 * 64, &now);
        if (again != j) {
            j = again;
            fits = put(of, &now, codes, &needed);
        }
    }
    while (!fits && j < LAST_STEP) {
        now = choice_at(of, ++j, GC_SAMPLE_EVERY);
        fits = put(of, &now, codes, &needed);
    }
    return fits ? now.scale : 0;
}

/* ---- groups ---------------------------------------------------------------------------------- */
static void encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run, uint8_t *codes,
                         gc_entropy_stage *stage, const gc_entropy_encoder *tier)
{
    gc_block_totals totals = {0, 0, 0};
    uint64_t residual = segment->residual + run.first;
    gc_block_view view = {job->src, job->dtype, segment->data + run.first,
                          job->residual_in ? job->residual_in + residual : NULL, 2};
    stage->src_size = job->dtype == GC_F32 ? 4 : 2;
    stage->next_src = (uintptr_t)job->src + (view.data + run.numel) * stage->src_size;
    stage->next_residual = view.residual ? (uintptr_t)(view.residual + run.numel) : 0;
    stream of = {tier, stage,     gc_get_entropy_tables(),
                 0,    run.numel, (uint32_t)gc_stream_code_nbytes(run.numel, job->stream_nbytes)};
    for (uint32_t i = 0; i < run.numel; i += GC_BLOCK_NUMEL) {
        uint32_t numel = run.numel - i < GC_BLOCK_NUMEL ? run.numel - i : GC_BLOCK_NUMEL;
        tier->take(&totals, stage->block.x + i, &view, i, numel);
    }
    memset(stage->block.x + run.numel, 0, 64 * sizeof(float)); /* which are made codes, too */
    gc_keep_residuals(job, segment, run.first, run.numel);
    of.rms = sqrt(totals.sum_squares / run.numel);
    stage->rest = (gc_entropy_rest){.out = job->residual_out ? job->residual_out + residual : NULL,
                                    .decay = job->decay,
                                    .streams = job->residual_out != job->residual_in &&
                                               segment->numel >= 1 << 15};
    float scale = 0;
    if (totals.absmax_bits >= GC_INF_BITS) {
        job->nonfinite = 1;
        scale = gc_float_of(GC_NAN_BITS);
    } else if (totals.any_gradient && step_of(of.rms, 0) >= FLT_MIN) {
        scale = encode_stream(&of, codes);
    }
    if (!(scale > 0)) {
        memset(codes, 0, of.code_nbytes);
        codes[0] = GC_ZEROS_TABLE;
        memset(stage->codes, 0, sizeof stage->codes);
        set_scale(stage, scale, 0);
    }
    gc_store_u32(job->payload + segment->scales + 4 * (size_t)run.group, gc_bits_of(scale));
    float *out = stage->rest.out;
    if (!out)
        return;
    if (job->nonfinite && !(scale >= 0)) {
        for (uint32_t i = 0; i < run.numel; i++)
            out[i] = gc_float_of(GC_NAN_BITS);
        return;
    }
    if (!stage->rest.is_written)
        tier->rest(stage, run.numel);
    gc_count_dropped(job, stage->rest.left);
}

void gc_encode_streams(gc_encode_job *job, const gc_segment *segment,
                       const gc_entropy_encoder *tier)
{
    gc_entropy_stage stage;
    uint8_t *codes = job->payload + segment->codes;
    for (uint32_t i = 0; i < segment->numel;) {
        gc_run run = gc_run_at(segment, i, segment->numel);
        encode_group(job, segment, run, codes, &stage, tier);
        codes += gc_stream_code_nbytes(run.numel, job->stream_nbytes);
        i += run.numel;
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* ---- other kernel sets ----------------------------------------------------------------------- */
void gc_entropy_tables_of(uint32_t *symbols, uint32_t *decode, uint32_t *costs,
                          uint32_t *pair_costs, uint32_t *tops, double *octave_out)
{
    const gc_entropy_tables *all = gc_get_entropy_tables();
    memcpy(octave_out, octave, sizeof octave);
    memcpy(costs, all->costs, sizeof all->costs);
    for (int t = 0; t < GC_TABLE_COUNT; t++) {
        const gc_entropy_table *from = &all->tables[t];
        tops[t] = (uint32_t)from->top;
        memcpy(pair_costs, from->pair_costs, sizeof from->pair_costs);
        pair_costs += GC_COUNTED_CODES * 16;
        for (int i = 0; i < GC_SYMBOLS_COUNT; i++) {
            uint32_t length = from->symbols[i] & 63;
            *symbols++ = (uint32_t)(from->symbols[i] >> (64 - length)) | length << 16;
        }
        for (int i = 0; i < 1 << GC_CODE_NBITS; i++) {
            const gc_look *look = &from->decode[i];
            *decode++ = (uint8_t)look->codes[0] | (uint32_t)(uint8_t)look->codes[1] << 8 |
                        (uint32_t)look->first_bits << 16 | (uint32_t)!look->numel << 24;
        }
    }
}
