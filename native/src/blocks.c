/* blocks.c - see blocks.h. */
#include "blocks.h"

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CHUNK_NUMEL = GC_ONEBIT_STAGE_NUMEL, STREAM_NUMEL = 1 << 15, PADDING_NUMEL = 64 };

/* A walk over the groups of a segment. One staged chunk at most waits for its codes. */
typedef struct {
    gc_encode_job *job;
    const gc_segment *segment;
    const gc_block_tier *tier;
    int can_both; /* tier->both may be called */
    double left;  /* by the codes of the segment */
    gc_block_view view;
    gc_block_staged waiting;
    uint32_t waiting_numel; /* still without codes */
    uint32_t first, numel;  /* the whole chunk */
    gc_block_stage *stage;  /* where it is */
    gc_block_stage stages[2];
} walk;

/* Move past `numel` elements that have their codes now. */
static void advance(walk *w, uint32_t numel)
{
    gc_block_staged *waiting = &w->waiting;
    waiting->x += numel;
    waiting->codes += (size_t)numel * waiting->bits / 8;
    if (waiting->out)
        waiting->out += numel;
    w->waiting_numel -= numel;
    if (!w->waiting_numel)
        gc_put_bits(w->job->payload + w->segment->codes, (uint64_t)w->first * waiting->bits,
                    w->stage->codes, (size_t)w->numel * waiting->bits);
}

static void encode_waiting(walk *w, uint32_t most)
{
    uint32_t numel = w->waiting_numel < most ? w->waiting_numel : most;
    if (!numel)
        return;
    w->left += w->tier->emit(&w->waiting, numel);
    advance(w, numel);
}

/* Stage elements [chunk, chunk + numel) of a group, and encode those that wait. */
static gc_block_stage *stage_chunk(walk *w, gc_block_totals *totals, uint32_t chunk, uint32_t numel)
{
    gc_block_stage *stage = &w->stages[w->stage == &w->stages[0]];
    for (uint32_t i = 0; i < numel; i += GC_BLOCK_NUMEL) {
        uint32_t block = numel - i < GC_BLOCK_NUMEL ? numel - i : GC_BLOCK_NUMEL;
        if (w->can_both && block <= w->waiting_numel && block % PADDING_NUMEL == 0) {
            w->left += w->tier->both(totals, stage->x + i, &w->view, chunk + i, block, &w->waiting);
            advance(w, block);
        } else {
            w->tier->take(totals, stage->x + i, &w->view, chunk + i, block);
            encode_waiting(w, GC_BLOCK_NUMEL);
        }
    }
    if (numel % PADDING_NUMEL) /* which `emit` may read */
        memset(stage->x + numel, 0, PADDING_NUMEL * sizeof(float));
    encode_waiting(w, CHUNK_NUMEL);
    return stage;
}

/* Let a staged chunk of a group wait, where none does. */
static void let_wait(walk *w, gc_block_stage *stage, uint32_t first, uint32_t numel)
{
    w->stage = stage;
    w->first = first;
    w->numel = w->waiting_numel = numel;
    w->waiting.x = stage->x;
    w->waiting.codes = stage->codes;
    if (w->waiting.out)
        w->waiting.out = w->job->residual_out + w->segment->residual + first;
}

/* Stage one group and choose its levels. Returns 0 when it holds a value that is not finite; then
 * nothing waits, and no residual was written. */
static int encode_group(walk *w, gc_run run)
{
    gc_encode_job *job = w->job;
    const gc_segment *segment = w->segment;
    gc_block_stage *stage = NULL;
    gc_block_totals totals = {0, 0, 0}, again;
    double sum_squares = 0;
    w->view.data = segment->data + run.first;
    if (w->view.residual)
        w->view.residual = job->residual_in + segment->residual + run.first;
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        gc_next_run(&sum_squares, &totals.sum_squares, chunk);
        stage = stage_chunk(w, &totals, chunk, numel);
        gc_keep_residuals(job, segment, run.first + chunk, numel);
    }
    if (totals.absmax_bits >= GC_INF_BITS)
        return 0;
    totals.sum_squares += sum_squares;
    w->waiting.levels = gc_levels_of(&totals, run.numel, job);
    gc_store_u32(job->payload + segment->scales + 4 * (size_t)run.group,
                 gc_bits_of(w->waiting.levels.scale));
    if (run.numel <= CHUNK_NUMEL) {
        let_wait(w, stage, run.first, run.numel);
        return 1;
    }
    for (uint32_t chunk = 0; chunk < run.numel; chunk += CHUNK_NUMEL) {
        uint32_t numel = run.numel - chunk < CHUNK_NUMEL ? run.numel - chunk : CHUNK_NUMEL;
        stage = stage_chunk(w, &again, chunk, numel);
        let_wait(w, stage, run.first + chunk, numel);
    }
    return 1;
}

void gc_encode_blocks(gc_encode_job *job, const gc_segment *segment, const gc_block_tier *tier)
{
    walk w; /* without an initialiser, for the stages are large */
    gc_block_view view = {job->src, job->dtype, 0, job->residual_in, job->code_bits};
    gc_block_staged waiting = {.bits = job->code_bits,
                               .out = job->residual_out,
                               .decay = job->decay,
                               .streams = job->residual_out != job->residual_in &&
                                          segment->numel >= STREAM_NUMEL};
    w.job = job;
    w.segment = segment;
    w.tier = tier;
    w.can_both = tier->both && job->step > 0 && job->residual_in && job->residual_out;
    w.left = 0;
    w.view = view;
    w.waiting = waiting;
    w.waiting_numel = 0;
    w.stage = w.stages;
    for (gc_run run = gc_run_at(segment, 0, segment->numel); run.numel;) {
        if (!encode_group(&w, run))
            gc_block_group(job, segment, run);
        run.first += run.numel;
        run.numel = segment->numel - run.first < segment->group_numel ? segment->numel - run.first
                                                                      : segment->group_numel;
        run.group++;
    }
    encode_waiting(&w, CHUNK_NUMEL);
    gc_count_dropped(job, w.left);
    gc_pad_ternary(job, segment);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
