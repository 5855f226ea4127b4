/* gradcomp.h - the contract of gradcomp's C backend: kernels over flat gradients and packed
 * payloads.
 *
 * No Python, no MPI, no threads, no malloc, no global state but the chosen tier and constant tables
 * that the first call makes. Every
 * kernel is a pure function of its arguments, and its output bytes are the same on every tier; the
 * portable tier is the specification and tests/reference/ says the same in NumPy.
 * docs/reference/wire-format.md draws the bytes.
 *
 * Common rules, unless a prototype says otherwise:
 *   - Sizes: *_count and numel are elements, *_nbytes and offsets into payloads are bytes. Pointers
 *     may be NULL only when their count is 0 or where "optional" is written.
 *   - Alignment: tensors as their element type; payloads none (they are read and written with
 *     unaligned accesses).
 *   - Overlap: inputs and outputs must not overlap, except residual_in == residual_out.
 *   - Failure: GC_INVALID_ARGUMENT is returned before anything is written.
 *   - NaN and Inf never trap. Encoders report them through *nonfinite (set to 1, never cleared, by
 *     a relaxed atomic store: threads may share it); codes of non-finite elements are unspecified
 *     but valid and the same on every tier. Decoders write every NaN as the one quiet NaN
 *     0x7FC00000 (bf16 0x7FC0, f16 0x7E00).
 *   - Floating-point environment: round to nearest, denormals kept, whatever the caller's thread
 *     has set (MXCSR of x86 and FPCR of aarch64 are saved, set and restored by the dispatcher).
 */
#ifndef GRADCOMP_H
#define GRADCOMP_H

#include <stddef.h>
#include <stdint.h>

/* ---- status ---------------------------------------------------------------------------------- */
typedef enum {
    GC_OK = 0,
    /* a NULL pointer, unknown dtype, start not a multiple of 8, group_numel 0, ... */
    GC_INVALID_ARGUMENT = 1,
    GC_UNSUPPORTED_TIER = 2, /* this CPU or this build has no such tier */
    /* a ternary code `11`, a block's 15 (4 bits) or 255 (8 bits), a table that does not exist */
    GC_FORBIDDEN_CODE = 3,
    GC_BAD_PADDING = 4,    /* padding bits of the last byte are not what the format pins */
    GC_LANE_RANGE = 5,     /* an integer lane above 2 * world_size */
    GC_BAD_SCALE = 6       /* a scale that is not finite, or negative where it must not be */
} gc_status;

/* Name of a status ("GC_OK", ...); "GC_UNKNOWN_STATUS" for anything else. Static storage. */
const char *gc_status_name(int status);

/* ---- tiers ----------------------------------------------------------------------------------- */
/* Tier 0 is "portable"; tier 1 is "avx2" (needs avx2, bmi2, fma, f16c, sse4.2); tier 2 is "avx512"
 * (those and avx512f, avx512bw, avx512dq, avx512vl); tier 3 is "neon" (aarch64). */
int gc_tier_count(void);
const char *gc_tier_name(int tier); /* NULL when out of range */
int gc_tier_supported(int tier);    /* 1 when this build and this CPU run it */
/* the chosen tier; the best supported one until gc_tier_select is called */
int gc_tier_current(void);
int gc_tier_select(int tier); /* gc_status; not thread-safe: call it while no kernel runs */

/* ---- dtypes, segments ------------------------------------------------------------------------ */
enum { GC_F32 = 0, GC_BF16 = 1, GC_F16 = 2 };

/* Elements of a segment, at most: 2^32 - 4096, so that a 32-bit counter may step past the end (no
 * step is larger than GC_ONEBIT_STAGE_NUMEL) and not begin again at 0. */
#define GC_MAX_NUMEL 0xFFFFF000u

enum {
    /* sums are float64 over blocks of this many elements, counted from the group's start */
    GC_BLOCK_NUMEL = 512,
    /* inside a block element i is added to lane i % 16 in order of i; then, for k = 8, 4, 2, 1
     * in turn, lane[j] += lane[j + k] for j < k. The block's sum is lane 0. */
    GC_SUM_LANES = 16,
    /* a group's sum: its blocks in runs of this many elements, a run's blocks added in order to
     * 0.0, then the runs in order to 0.0: a device adds the runs of a large group side by side */
    GC_RUN_NUMEL = 512 * 512,
    /* groups with error feedback up to this size are encoded in one pass over memory */
    GC_ONEBIT_STAGE_NUMEL = 4096,
    /* flag: outputs are larger than the last-level cache, use streaming stores */
    GC_STREAM = 1
};

/* One contiguous run of elements of one parameter: where it lies in the tensor, in the residual
 * plane and in the payload. A parameter's groups are the intervals [j * group_numel, (j + 1) *
 * group_numel) of its elements; a segment holds those groups cut to [start, start + numel). The
 * scale of element e is number e / group_numel - start / group_numel of the segment's scales.
 * Element e's code stands at position e - start of the segment's codes. Layout: 56 bytes, no
 * padding. */
typedef struct {
    uint64_t data;        /* first element in the flat tensor (elements) */
    uint64_t residual;    /* first element in the residual plane (elements) */
    uint64_t codes;       /* first code byte from the payload's start (bytes) */
    uint64_t scales;      /* first scale from the payload's start (bytes) */
    uint64_t block;       /* first entry in the block table (gc_block_sums alone) */
    uint32_t start;       /* first element within the parameter; a multiple of 8 */
    uint32_t numel;       /* elements, at most GC_MAX_NUMEL; start + numel < 2^32 */
    uint32_t group_numel; /* >= 1 */
    uint32_t parameter;   /* position of the parameter, for the random counter */
} gc_segment;

/* Sums of one block of at most GC_BLOCK_NUMEL elements of one group. 24 bytes. */
typedef struct {
    double sum;         /* of x */
    double sum_squares; /* of x * x (exact products, rounded sums) */
    /* largest bit pattern of |x| as unsigned integer, so NaN > Inf > finite */
    uint32_t absmax_bits;
    uint32_t reserved; /* 0 */
} gc_block;

/* The Philox4x32-10 key (seed, rank) and the fixed words of the counter (block, parameter, step,
 * stream). */
typedef struct {
    uint32_t seed, rank, step, stream; /* stream < 2^31 */
} gc_rng_key;

/* ---- statistics ------------------------------------------------------------------------------ */
/* Sums and absolute maximum of every block of every segment. Blocks are counted from the start of
 * each group as cut by its segment's start: a segment that begins inside a group must begin at a
 * multiple of GC_BLOCK_NUMEL from that group's (cut) start. Segment s writes its blocks, group by
 * group, from blocks[s.block] on.
 *   src: tensor of dtype; blocks: large enough for all. nonfinite: see the common rules. */
gc_status gc_block_sums(const void *src, int dtype, const gc_segment *segments,
                        size_t segment_count, gc_block *blocks, uint32_t *nonfinite);

/* Ternary scale of each group: min(absmax, (float)(clip_sigma * std + max(0, |mean| - std))), mean
 * = sum/n and std = sqrt(max(0, sumsq/n - mean^2)) in float64 over the group's blocks, added
 * in runs (GC_RUN_NUMEL); clip_sigma <= 0 means no clipping. The mean counts as far as it exceeds
 * std, so that a group of equal elements keeps them. A group whose absmax is not finite gives that
 * absmax (as bit pattern), so that it wins the scale round.
 *   group_blocks: group_count + 1 indices into blocks; group_numels: elements of each group (0
 *   gives scale 0). */
gc_status gc_ternary_scales(const gc_block *blocks, const uint64_t *group_blocks,
                            const uint32_t *group_numels, size_t group_count, double clip_sigma,
                            float *scales);

/* ---- ternary: 2 bits, TernGrad (Wen et al. 2017, equations 3-5) ------------------------------ */
/* Encode with the scales that already stand in the payload (fp32, at each segment's `scales`). For
 * element e of the parameter, a = |x|, S its scale (finite, >= 0):
 *   p = fl32(a / S); S == 0 or p NaN gives code 0; p >= 1 gives sign(x). 16-bit draw r of e: Philox
 *   block c = philox(key = (seed, rank), counter = (8*(e/64) + e%8, parameter, step, stream)), word
 *   (e%64)/16 of c, low half when (e/8)%2 == 0, else high half. t = p * 65536 (exact), T =
 *   floor(t): r < T gives sign(x), r > T gives 0; r == T is decided by the deep draw d = word e%4
 *   of philox(counter = (e/4, parameter, step, stream | 0x80000000)): sign(x) if d < floor((t - T)
 *   * 2^32), else 0.
 * Codes: 00 = -1, 01 = 0, 10 = +1; element i of the segment in bits 2*(i%4) of byte i/4; padding
 * 01. Writes ceil(numel / 4) bytes per segment and nothing else. */
gc_status gc_ternary_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, uint8_t *payload, gc_rng_key key,
                            uint32_t *nonfinite);

/* Average of payload_count payloads of one layout (offsets are those of the segments in every
 * payload), written to out[data ...] in out_dtype (round to nearest even).
 *   shared != 0: k = sum of the codes as integers, S from payload 0: fl(fl(S / payload_count) * k).
 *   shared == 0: decoded values code * S are added in fp32 in payload order, then multiplied by
 *   fl(1 / payload_count) (one payload: the decoded value itself).
 * Codes must have been validated (a `11` decodes to an unspecified value, never out of bounds).
 *   flags: 0 or GC_STREAM. nonfinite: set to 1 when any value written is not finite. payload_count
 *   1..32767. */
gc_status gc_ternary_sum_decode(const uint8_t *const *payloads, size_t payload_count, int shared,
                                const gc_segment *segments, size_t segment_count, void *out,
                                int out_dtype, unsigned flags, uint32_t *nonfinite);

/* ---- exact integer lanes: sums of ternary codes in lane_bits bits ---------------------------- */
/* k + payload_count (0 .. 2 * payload_count), k the integer sum of the codes of element i, goes to
 * bits [i * lane_bits, (i + 1) * lane_bits) of the segment's lanes, little-endian bit stream,
 * padding bits 0. lane_bits = ceil(log2(2 * payload_count + 1)), 2..16. in_segments and
 * out_segments are parallel (same start and numel); they give the code offsets in the payloads and
 * the lane offsets in out. Scales are not touched. */
gc_status gc_ternary_sum_lanes(const uint8_t *const *payloads, size_t payload_count,
                               const gc_segment *in_segments, const gc_segment *out_segments,
                               size_t segment_count, unsigned lane_bits, uint8_t *out);

/* out = fl(fl(S / world_size) * (lane - world_size)), in out_dtype. flags, nonfinite: as
 * gc_ternary_sum_decode. */
gc_status gc_lanes_decode(const uint8_t *payload, size_t world_size, unsigned lane_bits,
                          const gc_segment *segments, size_t segment_count, void *out,
                          int out_dtype, unsigned flags, uint32_t *nonfinite);

/* ---- 1 bit with error feedback (Seide et al. 2014, section 2) -------------------------------- */
/* x = fl(g + r) (x = g when residual_in is NULL), bit = x > 0, element i of the segment in bit i%8
 * of byte i/8, padding 0. Two fp32 scales a group at the segment's `scales`: the means of x over
 * bit 0 and over bit 1, (float)(sum / count), sums as gc_block_sums does (blocks from the group's
 * cut start, elements of the other class count as +0.0; added in runs, GC_RUN_NUMEL), 0 for an
 * empty class. A group whose g is +-0 throughout gets both means 0 (bits stay x > 0), so its
 * residual stays. residual_out = fl(x - q), q the mean of the element's bit; not written when NULL.
 * Every group must lie whole in one segment. residual_in, residual_out: planes of fp32, optional,
 * may be the same: a residual is read for the last time before it is written. kept: a plane of its
 * own, optional: receives residual_in, so that who encodes in place can put it back. decay, 0 < d
 * <= 1: residual_out = fl(d * fl(x - q)); with 1 the rule above, bit for bit. dropped: optional;
 * one number a segment, to which (1 - d) * sum |fl(x - q)| is added: for people, its rounding is
 * not pinned.
 * means: optional; two finite numbers, bit 0's and bit 1's, that stand for the class means of every
 * group (a group without gradient has 0 and 0 all the same). With -1 and 1 the codes are signs, as
 * in the paper's example. */
gc_status gc_onebit_encode(const void *src, int dtype, const gc_segment *segments,
                           size_t segment_count, const float *residual_in, float *residual_out,
                           float *kept, float decay, double *dropped, const float *means,
                           uint8_t *payload, uint32_t *nonfinite);

/* ---- units of second moments (preconditioned encoding) --------------------------------------- */
/* Every operation rounds on its own, in the order of the brackets; buffers of numel fp32 do not
 * overlap.
 * divide: units = fl(sqrt(moments) + floor); out = fl(fl(src + residual) / units), fl(src / units)
 * when residual is NULL.
 * multiply: values = fl(values * units). nonfinite: set to 1 when a value written is not finite,
 * here and in follow.
 * follow: x = fl(values * inverse); after = fl(fl(fl(x * x) * gain) + fl(before * keep)), before 1
 * when it is NULL. */
gc_status gc_moments_divide(const float *src, const float *residual, const float *moments,
                            float floor, uint64_t numel, float *units, float *out);
gc_status gc_moments_multiply(float *values, const float *units, uint64_t numel,
                              uint32_t *nonfinite);
gc_status gc_moments_follow(const float *values, float inverse, const float *before, float keep,
                            float gain, uint64_t numel, float *after, uint32_t *nonfinite);

/* ---- rotation (1 bit without residuals) ------------------------------------------------------ */
/* Groups are [j * group_numel, (j + 1) * group_numel) of the parameter, values its elements from
 * `first` on; what lies of a group in values is a run, of n elements. All of it in place, in fp32,
 * every operation rounded on its own.
 * rotate: in GC_ROTATION_ROUNDS rounds, r = 0, 1, with `stream` + r: flip the sign of element e
 * where bit e % 32 of word e / 32 % 4 of the Philox block (e / 128, parameter, step, stream) is
 * set. Then, with B the largest power of two up to n and GC_ROTATION_NUMEL, transform the windows
 * [0, B), [B, 2B), ... that fit, and if elements are left [n - B, n): for half = 1, 2, ... B / 2
 * replace (a, b), `half` apart, by (fl(a + b), fl(a - b)), then multiply by 2^-k for B = 2^2k, by
 * fl(2^-k * fl(sqrt(1/2))) for B = 2^(2k + 1). back != 0: all of it in the other order.
 * unbias: multiply a run by (float)(Q / (P * P / p + M * M / m)): Q the sum of squares, P and M
 * those of the p values above 0 and of the m others, as gc_onebit_encode has its classes (a class
 * of none adds 0), float64 in 8 sums by position in the run modulo 8, which are added in halves (0
 * + 4, 1 + 5, ... then 0 + 2, 1 + 3, then 0 + 1). A run without P and M stays as it is. */
enum { GC_ROTATION_NUMEL = 1024, GC_ROTATION_ROUNDS = 2 };
gc_status gc_rotate(float *values, uint64_t numel, uint32_t group_numel, uint64_t first,
                    uint32_t parameter, gc_rng_key key, int back);
gc_status gc_unbias(float *values, uint64_t numel, uint32_t group_numel, uint64_t first);

/* Multiply a residual plane by factor, in place: the loss scale changed. */
gc_status gc_rescale(float *plane, uint64_t numel, float factor);

/* Decoded values (bit ? scale[1] : scale[0]) added in fp32 in payload order, times fl(1 /
 * payload_count); see gc_ternary_sum_decode for the rest. */
gc_status gc_onebit_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                               const gc_segment *segments, size_t segment_count, void *out,
                               int out_dtype, unsigned flags, uint32_t *nonfinite);

/* ---- blocks: 2, 4 or 8 bits with error feedback, evenly spaced levels ------------------------ */
/* x = fl(g + r) (x = g when residual_in is NULL). One fp32 scale S a group at the segment's
 * `scales`, the distance of two levels: 2 bits: (float)(GC_BLOCK2_STEP * sqrt(sumsq / n)), sumsq
 * that of x as in gc_block_sums, blocks from the group's cut start, added in runs (GC_RUN_NUMEL); 4
 * bits: fl(max|x| / 7); 8 bits: fl(max|x| / 127). S is 0 for a group whose g is +-0 throughout (its
 * residual stays), and where it would be below 2^-126. With i = fl(1 / S), 0 for S = 0, and Z =
 * 1.5, 7 or 127:
 *   t = fl(fl(x * i) + Z), below 0 or NaN 0, above 3, 14 or 254 that; code = t rounded to nearest
 *   even; q = fl((code - Z) * S).
 * Element i of the segment in code_bits bits from bit i * code_bits of a little-endian bit stream,
 * padding 0; of 4 bits code 15 and of 8 bits code 255 are not written. residual_out = fl(decay *
 * fl(x - q)); not written when NULL. Every group must lie whole in one segment. residual_in,
 * residual_out, kept, decay, dropped: as gc_onebit_encode. */
/* Max 1960, table II: the best of four evenly spaced levels for a normal distribution */
#define GC_BLOCK2_STEP 0.9957
gc_status gc_block_encode(const void *src, int dtype, const gc_segment *segments,
                          size_t segment_count, unsigned code_bits, const float *residual_in,
                          float *residual_out, float *kept, float decay, double *dropped,
                          uint8_t *payload, uint32_t *nonfinite);

/* ---- ternary codes rounded to the nearest level, with error feedback ------------------------- */
/* x and its groups as gc_block_encode. One fp32 scale S a group: (float)(step * sqrt(sumsq / n)),
 * at most FLT_MAX; 0 where g is +-0 throughout and where it would be below 2^-126. With h = fl(S /
 * 2): x > h gives +1, x < -h gives -1, all else 0; S = 0 gives 0. Codes and padding as
 * gc_ternary_encode writes them, and its decoder reads them (shared = 0). q = code * S;
 * residual_out = fl(decay * fl(x - q)). step: finite, above 0. The rest: as gc_block_encode. */
gc_status gc_nearest_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, double step, const float *residual_in,
                            float *residual_out, float *kept, float decay, double *dropped,
                            uint8_t *payload, uint32_t *nonfinite);

/* Decoded values fl((code - Z) * S) added in fp32 in payload order, times fl(1 / payload_count);
 * see gc_ternary_sum_decode for the rest. */
gc_status gc_block_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                              unsigned code_bits, const gc_segment *segments, size_t segment_count,
                              void *out, int out_dtype, unsigned flags, uint32_t *nonfinite);

/* ---- entropy-coded codes in a fixed number of bytes, with error feedback --------------------- */
/* Groups are of GC_STREAM_NUMEL elements of the parameter (group_numel must be that): a group, or
 * what the segment has of it, is a stream of n elements. With B = stream_nbytes, what a whole
 * stream takes with its scale, its codes take B - 4 bytes where n = GC_STREAM_NUMEL, else ceil(n *
 * B / GC_STREAM_NUMEL) + 4; streams follow one another.
 *
 * x, its sum of squares and zero groups as gc_block_encode. R = sqrt(sumsq / n) in float64. One of
 * the steps S = (float)(fl64(R * 2^(i/32)) * 2^(k - 4)), i = 0..31, k = 0..7, at most FLT_MAX /
 * 32768, is the stream's scale; 0 where the first of them is below 2^-126, and where the codes of
 * no step fit, which happens to R above FLT_MAX / 2^19 alone. With v = fl(1 / S): code = fl(x * v)
 * rounded to nearest even, cut to -32767 and 32767; q = fl(code * S).
 * residual_out = fl(decay * fl(x - q)).
 *
 * The codes' bytes: the number of a table; a bit stream of the first half of the pairs of codes
 * (ceil(ceil(n / 2) / 2) of ceil(n / 2) pairs; behind an odd number of codes stands a 0), least
 * significant bit of a byte first; zeros; the bit stream of the other half, whose first byte is
 * the last one of the codes and so on backwards. A pair is a symbol of the table's Huffman code, or
 * where it has none the escape symbol, and behind it each code c: the number L of bits of |c| in 4
 * bits, and where L > 0 a bit that is set for c < 0 and the L - 1 bits of |c| below the leading
 * one. The last byte of both is filled with zeros. S = 0: table 7, whose zero bits are pairs of 0
 * (others begin with negative codes, which decode to -0), and zeros. A NaN or Inf among x: S NaN,
 * these bytes, residuals NaN.
 *
 * Tables (entropy_tables.c): from weights f[|a|] * f[|b|] of pairs, what is missing from 2^28 that
 * of the escape; symbols by a, then b, the escape last. Lengths of at most 11 bits by
 * package-merge: at every level symbols and packages by weight, symbols before packages and lower
 * numbers before higher ones of the same; canonical codes by length, then number, written most
 * significant bit first.
 *
 * The step: the smallest that is found to fit. entropy_encode.c is the rule; it reads counts of
 * |code| 0 to 7 and above, and the bytes that came out, so that all tiers choose alike. Which step
 * and table an encoder takes is its own affair: decoders need to know neither rule.
 * Every group must lie whole in one segment. residual_in, residual_out, kept, decay, dropped: as
 * gc_onebit_encode. */
enum { GC_STREAM_NUMEL = 4096, GC_STREAM_NBYTES_LEAST = 512, GC_STREAM_NBYTES_MOST = 2048 };
gc_status gc_entropy_encode(const void *src, int dtype, const gc_segment *segments,
                            size_t segment_count, uint32_t stream_nbytes, const float *residual_in,
                            float *residual_out, float *kept, float decay, double *dropped,
                            uint8_t *payload, uint32_t *nonfinite);

/* Decoded values fl(code * S) added in fp32 in payload order, times fl(1 / payload_count); see
 * gc_ternary_sum_decode for the rest. Any bytes are safe: a table's number is taken modulo 16, bits
 * beyond the codes' bytes are 0, behind an escape stand numbers of up to 15 bits. S = 0 makes zeros
 * of all codes, of a sign that is not pinned. */
gc_status gc_entropy_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                                uint32_t stream_nbytes, const gc_segment *segments,
                                size_t segment_count, void *out, int out_dtype, unsigned flags,
                                uint32_t *nonfinite);

/* The tables, for kernel sets of other devices. By table: symbols[256], by (a + 8) << 4 | (b + 8),
 * bits, least significant first, and from bit 16 on their number, [0] the escape; decode[2048], by
 * the next 11 bits, a pair's codes, a byte each, from bit 16 on its number of bits, bit 24 set for
 * the escape; pair_costs[9][16], in 1/64 bit, by both |code|, 8 standing for all above; tops, the
 * largest |code| that has symbols. costs[9][16]: of one |code|, by table. octave[32]: 2^(i / 32).
 * */
enum { GC_TABLE_COUNT = 16 };
void gc_entropy_tables_of(uint32_t *symbols, uint32_t *decode, uint32_t *costs,
                          uint32_t *pair_costs, uint32_t *tops, double *octave);

/* ---- plain values: Identity, small and excluded tensors, bf16 second phase ------------------- */
/* Copy values into the payload as value_dtype (GC_F32 or GC_BF16, little-endian, nearest even). */
gc_status gc_values_encode(const void *src, int dtype, const gc_segment *segments,
                           size_t segment_count, int value_dtype, uint8_t *payload,
                           uint32_t *nonfinite);

/* Sum in fp32 in payload order, times fl(1 / payload_count) (one payload: the value itself). */
gc_status gc_values_sum_decode(const uint8_t *const *payloads, size_t payload_count,
                               int value_dtype, const gc_segment *segments, size_t segment_count,
                               void *out, int out_dtype, unsigned flags, uint32_t *nonfinite);

/* ---- checks ---------------------------------------------------------------------------------- */
/* GC_FORBIDDEN_CODE for a `11`, GC_BAD_PADDING for padding other than 01. */
gc_status gc_ternary_validate(const uint8_t *payload, const gc_segment *segments,
                              size_t segment_count);
/* GC_BAD_PADDING for padding bits other than 0. */
gc_status gc_onebit_validate(const uint8_t *payload, const gc_segment *segments,
                             size_t segment_count);
/* GC_FORBIDDEN_CODE for a code that is not written, GC_BAD_PADDING for padding bits other than
 * 0. */
gc_status gc_block_validate(const uint8_t *payload, unsigned code_bits, const gc_segment *segments,
                            size_t segment_count);
/* GC_FORBIDDEN_CODE for a table that does not exist. */
gc_status gc_entropy_validate(const uint8_t *payload, uint32_t stream_nbytes,
                              const gc_segment *segments, size_t segment_count);
/* GC_LANE_RANGE for a lane above 2 * world_size, GC_BAD_PADDING for padding bits other than 0. */
gc_status gc_lanes_validate(const uint8_t *payload, size_t world_size, unsigned lane_bits,
                            const gc_segment *segments, size_t segment_count);
/* GC_BAD_SCALE unless all scale_count fp32 at scales (unaligned) are finite and, if non_negative,
 * not below 0 (-0.0 is refused too when non_negative). */
gc_status gc_scales_validate(const uint8_t *scales, size_t scale_count, int non_negative);

/* CRC-32C (Castagnoli, reflected, init and xorout 0xFFFFFFFF) of data, continuing crc (0 to begin).
 * "123456789" gives 0xE3069283. */
uint32_t gc_crc32c(uint32_t crc, const uint8_t *data, size_t data_nbytes);

/* ---- copies ---------------------------------------------------------------------------------- */
typedef struct {
    uint64_t dst, src, nbytes;
} gc_copy_range; /* byte offsets from the two bases */
/* memcpy of every range: how one encoded bucket is cut into messages. */
gc_status gc_copy(uint8_t *dst, const uint8_t *src, const gc_copy_range *ranges,
                  size_t range_count);

/* ---- weight updates -------------------------------------------------------------------------- */
/* What an update does to every element. All arithmetic is fp32; fma is one rounding; a NaN is
 * stored as 0x7FC00000.
 *   g: the gradient as fp32, its sign flipped by GC_MAXIMIZE; GC_PRESCALE: g = g * prescale.
 *   w: the weight. s0, s1: the state.
 *   GC_SGD:      weight_decay != 0: g = fma(weight_decay, w, g) momentum != 0: s0 = GC_FIRST ? g :
 *                fma(keep, g, momentum * s0); g = GC_NESTEROV ? fma(momentum, s0, g) : s0 w =
 *                fma(step_size, g, w)
 *   GC_ADAGRAD:  weight_decay != 0: g = fma(weight_decay, w, g) s0 = fma(g, g, s0); w = w +
 *                (step_size * g) / (sqrt(s0) + eps)
 *   GC_MOMENTS (first step of all below): s0 = keep < 0.5 ? fma(keep, g - s0, s0) : fma(keep - 1,
 *                g - s0, g); s1 = fma(keep2 * g, g, s1 * beta2)
 *   GC_ADAMW:    decay != 1: w = w * decay; then GC_MOMENTS; w = w + (step_size * s0) / (sqrt(s1) /
 *   bias2 + eps) GC_LAMB_NORMS, GC_LAMB_APPLY: u = (bias1 * s0) / (sqrt(s1) + eps), weight_decay !=
 *   0: u = fma(weight_decay, w, u)
 *                NORMS adds w^2 and u^2 up (float64, element i of the segment in lane i %
 *                GC_SUM_LANES, lanes as in blocks); APPLY: w = fma(step_size, u, w). GC_LAMB_START
 *                is MOMENTS and NORMS in one pass.
 *   GC_SQUARES:  adds g^2 up in the same way and changes nothing. Of payloads, the sums of runs of
 *                GC_UPDATE_NUMEL elements of a segment are added in order (entropy: of a stream,
 *                and then the streams' sums). */
enum {
    GC_SGD = 0,
    GC_ADAGRAD = 1,
    GC_ADAMW = 2,
    GC_MOMENTS = 3,
    GC_LAMB_START = 4,
    GC_LAMB_NORMS = 5,
    GC_LAMB_APPLY = 6,
    GC_SQUARES = 7
};
enum { GC_UPDATE_NUMEL = 2048 }; /* elements of payloads that are decoded at a time */
enum { GC_MAXIMIZE = 1, GC_FIRST = 2, GC_NESTEROV = 4, GC_PRESCALE = 8 };

/* Two ways to hold an fp32 number w = (hi, lo) as bf16 top and 16-bit trail; trail is lo in both.
 * GC_TRUNCATE: top = hi. GC_NEAREST: top = hi + (lo >> 15), which is w rounded to bf16 with halves
 * away from zero. */
enum { GC_TRUNCATE = 0, GC_NEAREST = 1 };

/* 56 bytes; `rounding` is GC_TRUNCATE or GC_NEAREST. */
typedef struct {
    uint32_t kind, flags, rounding;
    float step_size, weight_decay, decay, momentum, keep, keep2, beta2, bias1, bias2, eps, prescale;
} gc_rule;

#define GC_NO_RULE 0xFFFFFFFFu

/* One parameter; addresses of its first element. 48 bytes. */
typedef struct {
    uint64_t weight;         /* bf16 tops when there is a trail, else fp32 */
    uint64_t trail;          /* 0: the weight is fp32 */
    uint64_t gradient;       /* not read when gradients come from payloads */
    uint64_t state0, state1; /* fp32, what the rule needs of them */
    uint32_t rule;           /* index, or GC_NO_RULE: segments of this parameter are passed over */
    uint32_t gradient_dtype; /* GC_F32 or GC_BF16 */
} gc_target;

/* Where gradients come from: tensors, or payloads that are decoded and averaged as gc_*_decode
 * would, rounded to `dtype`, a few thousand elements at a time. */
enum {
    GC_FROM_TENSORS = 0,
    GC_FROM_TERNARY = 1,
    GC_FROM_ONEBIT = 2,
    GC_FROM_VALUES = 3,
    GC_FROM_LANES = 4,
    GC_FROM_BLOCK = 5,
    GC_FROM_ENTROPY = 6
};
typedef struct {
    const uint8_t *const *payloads;
    size_t payload_count;
    size_t world_size;       /* lanes alone */
    int from, dtype;         /* dtype: GC_F32 or GC_BF16; payloads alone */
    int shared, value_dtype; /* as gc_ternary_sum_decode, gc_values_sum_decode */
    unsigned lane_bits;      /* lanes alone */
    unsigned code_bits;      /* blocks alone */
    uint32_t stream_nbytes;  /* entropy alone */
} gc_gradients;

/* Update the elements [start, start + numel) of parameter `parameter`, for every segment:
 * targets[parameter] has its addresses and rule. Weights, trails and states are read once and
 * written once, in place; nothing else is written but norms[2 * s], norms[2 * s + 1] (w^2 and u^2,
 * or g^2 and 0) of segment s, for kinds that add up.
 *   nonfinite: set to 1 when an average decoded from payloads is not finite (the update is done all
 *   the same). Alignment: as element types. Targets must not overlap. Same bytes on every tier and
 *   for every cut into segments (norms: for the same segments; a NaN is 0x7FF8000000000000). */
gc_status gc_update(const gc_gradients *gradients, const gc_segment *segments, size_t segment_count,
                    const gc_target *targets, size_t target_count, const gc_rule *rules,
                    size_t rule_count, double *norms, uint32_t *nonfinite);

/* top and trail of w, and back: exact for all but signalling NaNs under GC_NEAREST, which become
 * quiet. numel elements. */
gc_status gc_split(const uint32_t *w_bits, uint64_t numel, int rounding, uint16_t *top,
                   uint16_t *trail);
gc_status gc_join(const uint16_t *top, const uint16_t *trail, uint64_t numel, int rounding,
                  uint32_t *w_bits);

/* ---- random numbers -------------------------------------------------------------------------- */
/* One Philox4x32-10 block (Salmon et al. 2011), for tests: counter 0, key 0 gives 6627e8d5 e169c58d
 * bc57ac4c 9b00dbd8. */
void gc_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
