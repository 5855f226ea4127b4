/* pieces.h - how the vector tiers' decoders walk a segment: pieces that stay in the first-level
 * cache.
 *
 * Vector code handles finite values alone. A kernel notes the largest |x| of a block, group or
 * piece; where that is not finite the portable part does it again, so that NaNs are the same on
 * every tier at no cost to the others. Outputs never overlap inputs, so doing a piece again is
 * always possible.
 */
#ifndef GC_PIECES_H
#define GC_PIECES_H

#include "numeric.h"

/* ---- decoded values -------------------------------------------------------------------------- */
enum {
    /* a piece's values (4 KB) and sums stay in the first-level cache */
    GC_PIECE_NUMEL = 1024,
    GC_STAGE_NUMEL = GC_PIECE_NUMEL + 32, /* kernels may write a vector more */
    /* bytes that kernels may read after a piece's codes */
    GC_PADDING_NBYTES = 32,
    /* codes of a piece at 16 bits an element, and padding */
    GC_PADDED_NBYTES = 2 * GC_PIECE_NUMEL + 64
};

/* A part of a segment that lies in one group (its run is as long) or is decoded with a scale for
 * each element. */
typedef struct {
    uint32_t first, numel; /* numel is a multiple of 8, at most GC_PIECE_NUMEL */
    gc_run run;            /* of the first element */
    int is_uniform;        /* one group */
} gc_piece;

/* Writes a piece, or returns 0 if a value may not be finite. */
typedef int gc_decode_piece(gc_decode_job *job, const gc_segment *segment, const gc_piece *piece);

/* Decode a segment piece by piece; what is left over, and pieces with values that are not finite,
 * go to `span`. */
void gc_decode_pieces(gc_decode_job *job, const gc_segment *segment, gc_decode_piece *decode,
                      gc_decode_span *span);

/* Fill values[0 .. piece->numel), and up to 7 more, with scale `stride * group + offset` of each
 * element's group. */
void gc_fill_scales(const uint8_t *payload, const gc_segment *segment, const gc_piece *piece,
                    uint32_t stride, uint32_t offset, float *values);

/* The code bytes from the one that holds the piece's first element on, with GC_PADDING_NBYTES that
 * may be read after the piece's last: in place or, near the end of the segment, in `padded`. */
const uint8_t *gc_padded_codes(const uint8_t *payload, const gc_segment *segment,
                               const gc_piece *piece, unsigned bits, uint8_t *padded);

/* Whether the piece may be written with streaming stores. */
int gc_piece_streams(const gc_decode_job *job, const gc_segment *segment, const gc_piece *piece);

/* Bit patterns of |x| from here on become Inf or NaN in the output dtype. */
GC_INLINE uint32_t gc_overflow_bits(int dtype)
{
    /* bf16: half a unit above its largest value, 0x7F7F; f16: 65520, half a unit above 65504. */
    return dtype == GC_F32 ? GC_INF_BITS : dtype == GC_BF16 ? 0x7F7F8000u : 0x477FF000u;
}

#endif
