/* harness.h - guarded buffers, pseudo-random numbers and checks for the native tests. */
#ifndef GC_TEST_HARNESS_H
#define GC_TEST_HARNESS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradcomp.h"

/* ---- the floating-point environment of this thread ------------------------------------------- */
#if defined(__x86_64__)
#include <immintrin.h>
#define HAS_FLOAT_ENVIRONMENT 1
/* Towards zero, flush to zero, denormals are zero; bits 0-5 note what happened. */
enum { FLOAT_DEFAULT = 0x1F80, FLOAT_ODD = 0xFFC0, FLOAT_MODES = ~0x3F };
static inline unsigned float_environment(void) { return _mm_getcsr(); }
static inline void set_float_environment(unsigned modes) { _mm_setcsr(modes); }
#elif defined(__aarch64__)
#define HAS_FLOAT_ENVIRONMENT 1
/* Towards zero, flush to zero, every NaN the default one. */
enum { FLOAT_DEFAULT = 0, FLOAT_ODD = 3 << 22 | 1 << 24 | 1 << 25, FLOAT_MODES = ~0 };
static inline unsigned float_environment(void)
{
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return (unsigned)fpcr;
}
static inline void set_float_environment(unsigned modes)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)modes) : "memory");
}
#endif

/* What the current case is, printed when a check fails. */
extern char case_name[512];

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s\n  in case: %s\n", __FILE__, __LINE__, #condition, \
                    case_name);                                                           \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

/* ---- random numbers (xorshift64*), the same in every run unless a seed is given -------------- */
uint64_t random_u64(void);
uint32_t random_below(uint32_t bound); /* 0 for bound 0 */
void random_seed(uint64_t seed);
/* From here on two bytes of `data` decide each number, until none is left (fuzzing). */
void random_from(const uint8_t *data, size_t nbytes);

/* ---- buffers between two pages that may not be touched --------------------------------------- */
enum { SLOT_COUNT = 48 };
typedef enum { AT_END, AT_START } placement; /* which guard page the buffer touches */

/* `nbytes` bytes in slot `slot`, all `fill`; what the slot held is gone. */
void *guarded(int slot, size_t nbytes, placement where, uint8_t fill);
/* What `guarded` returned for these arguments, as it now is. */
void *slot_bytes(int slot, size_t nbytes, placement where);

/* ---- values ---------------------------------------------------------------------------------- */
typedef enum {
    NORMAL,
    ZEROS,
    SPARSE,
    TINY,
    HUGE_VALUES,
    F16_EDGE,
    BF16_EDGE,
    NONFINITE,
    ANY_BITS,
    KIND_COUNT
} value_kind;

/* Fill a tensor of `dtype` (4 or 2 bytes an element). */
void fill_tensor(void *tensor, int dtype, size_t numel, value_kind kind);
float random_value(value_kind kind);

int is_finite_bits(float value);

#endif
