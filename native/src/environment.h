/* environment.h - the floating-point environment that every kernel runs in, whatever the caller's thread has set. */
#ifndef GC_ENVIRONMENT_H
#define GC_ENVIRONMENT_H

#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
/* Round to nearest even, denormals kept, every exception masked. */
enum { GC_MXCSR_DEFAULT = 0x1F80 };
#endif

GC_INLINE unsigned gc_enter_float_environment(void)
{
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(GC_MXCSR_DEFAULT);
    return saved;
#else
    return 0;
#endif
}

GC_INLINE void gc_leave_float_environment(unsigned saved)
{
#if defined(__x86_64__)
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

#endif
