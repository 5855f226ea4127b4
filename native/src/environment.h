/* environment.h - the floating-point environment that every kernel runs in, whatever the caller's
 * thread has set. */
#ifndef GC_ENVIRONMENT_H
#define GC_ENVIRONMENT_H

#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
/* Round to nearest even, denormals kept, every exception masked. */
enum { GC_MXCSR_DEFAULT = 0x1F80 };
#endif

#if defined(__aarch64__)
/* FPCR 0: round to nearest even, denormals kept, NaNs as they are, IEEE half precision. */
GC_INLINE unsigned gc_get_fpcr(void)
{
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return (unsigned)fpcr;
}

GC_INLINE void gc_set_fpcr(unsigned fpcr)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)fpcr));
}
#endif

GC_INLINE unsigned gc_enter_float_environment(void)
{
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(GC_MXCSR_DEFAULT);
    return saved;
#elif defined(__aarch64__)
    unsigned saved = gc_get_fpcr();
    gc_set_fpcr(0);
    return saved;
#else
    return 0;
#endif
}

GC_INLINE void gc_leave_float_environment(unsigned saved)
{
#if defined(__x86_64__)
    _mm_setcsr(saved);
#elif defined(__aarch64__)
    gc_set_fpcr(saved);
#else
    (void)saved;
#endif
}

#endif
