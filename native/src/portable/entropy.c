/* entropy.c - streams of entropy-coded codes: what the tiers do each in their own way. */
#include "entropy_read.h"
#include "entropy_write.h"

/* ---- encoding -------------------------------------------------------------------------------- */
GC_INLINE void take_body(gc_block_totals *totals, float *staged, const gc_block_view *view,
                         uint32_t first, uint32_t numel, int dtype)
{
    double lanes[GC_SUM_LANES] = {0};
    for (uint32_t i = 0; i < numel; i++) {
        float g = gc_load(view->src, dtype, view->data + first + i);
        float x = view->residual ? g + view->residual[first + i] : g;
        lanes[i % GC_SUM_LANES] += (double)x * x;
        totals->any_gradient |= gc_abs_bits(g);
        staged[i] = x;
    }
    gc_add_squares(totals, gc_lanes_total(lanes));
}

static void take(gc_block_totals *totals, float *staged, const gc_block_view *view, uint32_t first,
                 uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, staged, view, first, numel, GC_F32),
                take_body(totals, staged, view, first, numel, GC_BF16),
                take_body(totals, staged, view, first, numel, GC_F16));
}

static void count(const gc_entropy_stage *stage, uint32_t numel, uint32_t sampled, float inverse,
                  uint32_t counts[GC_COUNTED_CODES])
{
    memset(counts, 0, GC_COUNTED_CODES * sizeof *counts);
    for (uint32_t i = 0; i < numel; i++) {
        if (i % GC_SAMPLE_EVERY >= sampled)
            continue;
        int code = gc_entropy_code(stage->block.x[i], inverse);
        code = code < 0 ? -code : code;
        counts[code < GC_COUNTED_CODES - 1 ? code : GC_COUNTED_CODES - 1]++;
    }
}

static void weigh(const uint32_t counts[GC_COUNTED_CODES], const uint32_t (*matrix)[16],
                  uint32_t sums[16])
{
    memset(sums, 0, 16 * sizeof *sums);
    for (int k = 0; k < GC_COUNTED_CODES; k++)
        for (int i = 0; i < 16; i++)
            sums[i] += counts[k] * matrix[k][i];
}

static void quantize(gc_entropy_stage *stage, uint32_t numel, float inverse, int top)
{
    memset(stage->escapes, 0, sizeof stage->escapes);
    for (uint32_t i = 0; i < numel + 1; i++)
        stage->codes[i] = i < numel ? (int16_t)gc_entropy_code(stage->block.x[i], inverse) : 0;
    for (uint32_t i = 0; i < numel; i += 2) {
        int a = stage->codes[i], b = stage->codes[i + 1];
        stage->pairs[i / 2] = gc_pair_index(a, b);
        if (a < -top || a > top || b < -top || b > top)
            stage->escapes[i / 2 / GC_PUT_PAIRS] |= (uint16_t)(1 << i / 2 % GC_PUT_PAIRS);
    }
}

static void rest(gc_entropy_stage *stage, uint32_t numel)
{
    gc_entropy_rest *to = &stage->rest;
    to->left = 0;
    for (uint32_t i = 0; i < numel; i++) {
        float left = stage->block.x[i] - (float)stage->codes[i] * to->scale;
        to->out[i] = to->decay * left;
        to->left += left < 0 ? -left : left;
    }
}

static int put(gc_entropy_stage *stage, const gc_entropy_table *table, uint32_t numel,
               uint32_t code_nbytes, uint8_t *codes, size_t *needed)
{
    quantize(stage, numel, stage->rest.inverse, table->top);
    return gc_put_stream(stage, table, numel, code_nbytes, codes, needed, gc_write_pairs);
}

void gc_entropy_encode_portable(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_entropy_encoder tier = {take, count, weigh, put, rest};
    gc_encode_streams(job, segment, &tier);
}

/* ---- decoding -------------------------------------------------------------------------------- */
static void read(const gc_stream *one, const gc_stream *two, gc_stream_codes *into)
{
    gc_read_streams(one, two, into);
}

static void add(float *values, const int8_t *codes, uint32_t numel, float scale, int is_first)
{
    for (uint32_t i = 0; i < numel; i++) {
        float value = (float)codes[i] * scale;
        values[i] = is_first ? value : values[i] + value;
    }
}

void gc_write_values_portable(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                              uint32_t numel, const float *values, float factor)
{
    for (uint32_t i = 0; i < numel; i++)
        job->nonfinite |= gc_store(job->out, job->out_dtype, segment->data + first + i,
                                   values[i] * factor);
}

void gc_entropy_decode_portable(gc_decode_job *job, const gc_segment *segment)
{
    static const gc_entropy_decoder tier = {read, add, gc_write_values_portable, NULL};
    gc_decode_streams(job, segment, &tier);
}
