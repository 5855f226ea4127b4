/* cpu.c - what the processor and the operating system offer. */
#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Whether the operating system saves xmm and ymm registers (bits 1 and 2 of XCR0). Only valid with OSXSAVE. */
static int os_saves_ymm(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return (low & 6) == 6;
}

int gc_cpu_has_avx2(void)
{
    const unsigned wanted = bit_FMA | bit_SSE4_2 | bit_POPCNT | bit_OSXSAVE | bit_AVX | bit_F16C;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted || !os_saves_ymm())
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}
#else
int gc_cpu_has_avx2(void) { return 0; }
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

enum { CRC32_BIT = 1 << 7 }; /* HWCAP_CRC32, which old headers lack */
int gc_cpu_has_arm_crc32(void) { return (getauxval(AT_HWCAP) & CRC32_BIT) != 0; }
#elif defined(__ARM_FEATURE_CRC32)
int gc_cpu_has_arm_crc32(void) { return 1; }
#else
int gc_cpu_has_arm_crc32(void) { return 0; }
#endif
