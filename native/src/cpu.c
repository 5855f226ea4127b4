/* cpu.c - what the processor and the operating system offer. */
#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Bits of XCR0: what the operating system saves of xmm and ymm, and of mask and zmm registers. */
enum { YMM_STATE = 0x06, ZMM_STATE = 0xE6 };

/* Only valid with OSXSAVE. */
static int os_saves(uint32_t state)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return (low & state) == state;
}

int gc_cpu_has_avx2(void)
{
    const unsigned wanted = bit_FMA | bit_SSE4_2 | bit_POPCNT | bit_OSXSAVE | bit_AVX | bit_F16C;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted || !os_saves(YMM_STATE))
        return 0;
    const unsigned more = bit_AVX2 | bit_BMI2;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & more) == more;
}

int gc_cpu_has_avx512(void)
{
#ifdef GC_EMULATE_AVX512 /* tests/native/avx512_emulated.h */
    return gc_cpu_has_avx2();
#endif
    const unsigned wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    if (!gc_cpu_has_avx2() || !os_saves(ZMM_STATE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (b & wanted) == wanted;
}
#else
int gc_cpu_has_avx2(void) { return 0; }
int gc_cpu_has_avx512(void) { return 0; }
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
