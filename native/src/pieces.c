/* pieces.c - how the decoders of vector tiers walk a segment.
 *
 * Pieces end where the output's cache lines end, so that streaming stores fill whole lines; a piece
 * is cut at the end of a group where that is the end of a line, too, or where lines do not matter.
 * Rows of any width thus stream well.
 */
#include "pieces.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE_NBYTES = 64, CUT_NUMEL = 64 };

static uintptr_t output_address(const gc_decode_job *job, const gc_segment *segment,
                                uint32_t position)
{
    return (uintptr_t)job->out +
           (uintptr_t)(segment->data + position) * (job->out_dtype == GC_F32 ? 4 : 2);
}

/* Where the walk stands: the group of the next element and the position at which it ends. Steps
 * from group to group, since finding a run takes two divisions. */
typedef struct {
    uint64_t end;
    uint32_t group;
} group_cursor;

static group_cursor cursor_at(const gc_segment *segment, uint32_t position)
{
    gc_run run = gc_run_at(segment, position, segment->numel);
    group_cursor cursor = {(uint64_t)position + run.numel, run.group};
    return cursor;
}

static void move_cursor(group_cursor *cursor, const gc_segment *segment, uint32_t position)
{
    if (position < cursor->end)
        return;
    cursor->end += segment->group_numel;
    cursor->group++;
    if (position >= cursor->end)
        *cursor = cursor_at(segment, position);
}

static gc_piece piece_at(const gc_decode_job *job, const gc_segment *segment,
                         const group_cursor *cursor, uint32_t first)
{
    uint32_t size = job->out_dtype == GC_F32 ? 4 : 2, numel = segment->numel - first;
    uintptr_t address = output_address(job, segment, first);
    uint32_t offset = (uint32_t)(address % LINE_NBYTES) / size;
    if (offset && numel > LINE_NBYTES / size)
        numel = LINE_NBYTES / size - offset;
    else if (numel > GC_PIECE_NUMEL)
        numel = GC_PIECE_NUMEL;
    uint64_t left = cursor->end - first;
    gc_run run = {first, left < numel ? (uint32_t)left : numel, cursor->group};
    int ends_line = (address + (uintptr_t)run.numel * size) % LINE_NBYTES == 0;
    if (run.numel >= CUT_NUMEL && (ends_line || !(job->flags & GC_STREAM)))
        numel = run.numel;
    gc_piece piece = {first, numel, run, 0};
    return piece;
}

void gc_decode_pieces(gc_decode_job *job, const gc_segment *segment, gc_decode_piece *decode,
                      gc_decode_span *span)
{
    group_cursor cursor = cursor_at(segment, 0);
    for (uint32_t first = 0; first < segment->numel;) {
        move_cursor(&cursor, segment, first);
        gc_piece piece = piece_at(job, segment, &cursor, first);
        uint32_t rest = piece.numel % 8;
        first += piece.numel;
        piece.numel -= rest;
        piece.is_uniform = piece.run.numel >= piece.numel;
        if (piece.numel && !decode(job, segment, &piece))
            span(job, segment, piece.first, piece.numel);
        if (rest)
            span(job, segment, first - rest, rest);
    }
#if defined(__x86_64__)
    if (job->flags & GC_STREAM)
        _mm_sfence();
#endif
}

int gc_piece_streams(const gc_decode_job *job, const gc_segment *segment, const gc_piece *piece)
{
    return (job->flags & GC_STREAM) &&
           output_address(job, segment, piece->first) % LINE_NBYTES == 0;
}

void gc_fill_scales(const uint8_t *payload, const gc_segment *segment, const gc_piece *piece,
                    uint32_t stride, uint32_t offset, float *values)
{
    for (uint32_t i = 0; i < piece->numel;) {
        gc_run run = gc_run_at(segment, piece->first + i, piece->first + piece->numel);
        float scale = gc_scale(payload, segment, stride * run.group + offset);
        /* a vector may reach into the next run, which is filled later */
        for (uint32_t j = 0; j < run.numel; j += 8)
            for (uint32_t l = 0; l < 8; l++)
                values[i + j + l] = scale;
        i += run.numel;
    }
}

const uint8_t *gc_padded_codes(const uint8_t *payload, const gc_segment *segment,
                               const gc_piece *piece, unsigned bits, uint8_t *padded)
{
    const uint8_t *codes = payload + segment->codes;
    size_t first = (size_t)piece->first * bits / 8, total = gc_code_nbytes(segment->numel, bits);
    size_t end = gc_code_nbytes(piece->first + piece->numel, bits);
    if (end + GC_PADDING_NBYTES <= total)
        return codes + first;
    memcpy(padded, codes + first, end - first);
    memset(padded + (end - first), 0, GC_PADDING_NBYTES);
    return padded;
}
