/* internal.h - what the C files share: jobs, runs of a segment, the kernel table of a tier.
 *
 * A kernel handles one segment. The dispatcher has checked every argument before, walks the
 * segments, and passes on the flag of non-finite values that a kernel leaves in its job.
 */
#ifndef GC_INTERNAL_H
#define GC_INTERNAL_H

#include "gradcomp.h"

/* Every loop is compiled with constants in place of its options; tests, which need no speed, define
 * this as nothing and are compiled in a fifth of the time. */
#ifndef GC_ALWAYS_INLINE
#define GC_ALWAYS_INLINE __attribute__((always_inline))
#endif
#define GC_INLINE static inline GC_ALWAYS_INLINE

/* Run `body(..., dtype)` with a constant dtype, so that one always-inline body becomes a loop for
 * each. */
#define GC_BY_DTYPE(dtype, call_f32, call_bf16, call_f16) \
    do {                                                  \
        if ((dtype) == GC_F32)                            \
            call_f32;                                     \
        else if ((dtype) == GC_BF16)                      \
            call_bf16;                                    \
        else                                              \
            call_f16;                                     \
    } while (0)

/* ---- jobs: the arguments of a call that all its segments share ------------------------------- */
typedef struct {
    const void *src;
    int dtype;
    int value_dtype; /* values alone */
    uint8_t *payload;
    gc_block *blocks;         /* block sums alone */
    const float *residual_in; /* codecs with error feedback alone, may be NULL */
    float *residual_out;      /* the same */
    float *kept;              /* the same, NULL where residual_in is: receives it */
    float decay;              /* the same: what residual_out keeps of what codes leave out */
    /* the same, may be NULL: of the segment, receives what it does not keep */
    double *dropped;
    const float *means; /* 1 bit alone, NULL: those of the classes */
    unsigned code_bits; /* blocks alone */
    uint32_t stream_nbytes; /* entropy alone */
    /* blocks alone: above 0 for ternary codes of 2 bits, their scale in units of the rms */
    double step;
    gc_rng_key key;     /* ternary alone */
    uint32_t nonfinite; /* set by the kernels */
} gc_encode_job;

typedef struct {
    const uint8_t *const *payloads;
    size_t payload_count;
    void *out;
    int out_dtype;
    int shared;         /* ternary alone */
    int value_dtype;    /* values alone */
    unsigned code_bits; /* blocks alone */
    uint32_t stream_nbytes; /* entropy alone */
    unsigned lane_bits; /* lanes alone, with world_size */
    uint32_t world_size;
    unsigned flags;
    uint32_t nonfinite; /* set by the kernels */
} gc_decode_job;

/* ---- runs: the part of one group inside a segment -------------------------------------------- */
typedef struct {
    uint32_t first; /* position of its first element in the segment */
    uint32_t numel;
    uint32_t group; /* number of its scale among the segment's scales */
} gc_run;

/* The run at `position`, cut at `end` (both positions in the segment, position < end <= numel). */
GC_INLINE gc_run gc_run_at(const gc_segment *segment, uint32_t position, uint32_t end)
{
    uint32_t group = (segment->start + position) / segment->group_numel;
    uint64_t group_end = ((uint64_t)group + 1) * segment->group_numel - segment->start;
    gc_run run = {position, (uint32_t)(group_end < end ? group_end : end) - position,
                  group - segment->start / segment->group_numel};
    return run;
}

GC_INLINE size_t gc_code_nbytes(uint32_t numel, unsigned bits)
{
    return ((size_t)numel * bits + 7) / 8;
}

/* ---- a run of elements of one parameter, and its update -------------------------------------- */
/* Addresses are those of the run's first element. */
typedef struct {
    const gc_rule *rule;
    void *weight;
    uint16_t *trail; /* NULL: fp32 weights */
    float *state0, *state1;
    const void *gradient;
    int gradient_dtype;
    uint32_t numel;
    /* 2 * GC_SUM_LANES sums, to which element i adds in lane i % GC_SUM_LANES; NULL if nothing
     * adds up */
    double *lanes;
} gc_update_span;

/* ---- the kernels of a tier ------------------------------------------------------------------- */
typedef void gc_encode_kernel(gc_encode_job *job, const gc_segment *segment);
typedef void gc_decode_kernel(gc_decode_job *job, const gc_segment *segment);
typedef void gc_update_kernel(const gc_update_span *span);

typedef struct {
    gc_encode_kernel *block_sums, *ternary_encode, *onebit_encode, *block_encode, *values_encode,
        *entropy_encode;
    gc_decode_kernel *ternary_decode, *lanes_decode, *onebit_decode, *block_decode,
        *values_decode, *entropy_decode;
    void (*sum_lanes)(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                      uint8_t *lanes);
    gc_status (*ternary_validate)(const uint8_t *codes, uint32_t numel);
    gc_status (*onebit_validate)(const uint8_t *codes, uint32_t numel);
    gc_status (*block_validate)(const uint8_t *codes, uint32_t numel, unsigned code_bits);
    gc_status (*lanes_validate)(const uint8_t *lanes, uint32_t numel, uint32_t world_size,
                                unsigned lane_bits);
    uint32_t (*crc32c)(uint32_t crc, const uint8_t *data, size_t data_nbytes);
    gc_update_kernel *update;
} gc_kernels;

gc_encode_kernel gc_block_sums_portable, gc_ternary_encode_portable, gc_onebit_encode_portable,
    gc_block_encode_portable, gc_values_encode_portable, gc_entropy_encode_portable;
gc_decode_kernel gc_ternary_decode_portable, gc_lanes_decode_portable, gc_onebit_decode_portable,
    gc_block_decode_portable, gc_values_decode_portable, gc_entropy_decode_portable;
void gc_sum_lanes_portable(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                           uint8_t *lanes);
gc_status gc_ternary_validate_portable(const uint8_t *codes, uint32_t numel);
gc_status gc_onebit_validate_portable(const uint8_t *codes, uint32_t numel);
gc_status gc_block_validate_portable(const uint8_t *codes, uint32_t numel, unsigned code_bits);
gc_status gc_lanes_validate_portable(const uint8_t *lanes, uint32_t numel, uint32_t world_size,
                                     unsigned lane_bits);
uint32_t gc_crc32c_portable(uint32_t crc, const uint8_t *data, size_t data_nbytes);
gc_update_kernel gc_update_portable;

/* ---- parts of the portable kernels that other tiers call for heads, tails and non-finite value */
/* One block of at most GC_BLOCK_NUMEL elements, from element `first` of the tensor. */
gc_block gc_block_of(const void *src, int dtype, uint64_t first, uint32_t numel);
/* Ternary scale of one group from its blocks (gc_ternary_scales). */
float gc_ternary_scale_of(const gc_block *blocks, uint64_t block_count, uint32_t numel,
                          double clip_sigma);
/* Elements [first, first + numel) of a segment; for ternary codes `first` is a multiple of 4. */
typedef void gc_encode_span(gc_encode_job *job, const gc_segment *segment, uint32_t first,
                            uint32_t numel);
gc_encode_span gc_ternary_encode_span, gc_values_encode_span;
/* Ternary code of element `element` of a parameter, drawing its random numbers. */
unsigned gc_ternary_code(float x, float scale, uint32_t element, uint32_t parameter,
                         const gc_rng_key *key);
/* Copy the residuals of elements [first, first + numel) of a segment to job->kept, if there is
 * one. */
void gc_keep_residuals(const gc_encode_job *job, const gc_segment *segment, uint32_t first,
                       uint32_t numel);
/* Count what the decay takes of residuals whose magnitudes add up to `left`. */
GC_INLINE void gc_count_dropped(gc_encode_job *job, double left)
{
    if (job->dropped)
        *job->dropped += (1.0 - job->decay) * left;
}
/* Set the padding of a segment's codes to 01 where a block encoder writes ternary ones. */
GC_INLINE void gc_pad_ternary(gc_encode_job *job, const gc_segment *segment)
{
    uint8_t *last = job->payload + segment->codes + segment->numel / 4;
    unsigned used = 2 * (segment->numel % 4);
    if (job->step > 0 && used)
        *last = (uint8_t)((*last & ~(0xFFu << used)) | 0x55u << used);
}
/* One whole group. */
typedef void gc_encode_group(gc_encode_job *job, const gc_segment *segment, gc_run run);
gc_encode_group gc_onebit_group, gc_block_group;
/* Elements [first, first + numel) of a segment, over any groups. */
typedef void gc_decode_span(gc_decode_job *job, const gc_segment *segment, uint32_t first,
                            uint32_t numel);
gc_decode_span gc_ternary_decode_span, gc_lanes_decode_span, gc_onebit_decode_span,
    gc_block_decode_span, gc_values_decode_span;
void gc_sum_lanes_span(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                       uint8_t *lanes, uint32_t first, uint32_t numel);

/* ---- the chosen tier ------------------------------------------------------------------------- */
const gc_kernels *gc_current_kernels(void);

/* ---- the processor --------------------------------------------------------------------------- */
/* avx2, bmi2, fma, f16c and sse4.2, and the operating system saves the registers */
int gc_cpu_has_avx2(void);
int gc_cpu_has_avx512(void); /* avx2 and what avx512.h names */
int gc_cpu_has_arm_crc32(void);

#if defined(__x86_64__)
#include "x86/avx2.h"
#include "x86/avx512.h"
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)
#define GC_NEON 1
#include "arm/neon.h"
#endif

#endif
