/* crc32c.c - CRC-32C by the crc32 instruction of SSE4.2. */
#include "internal.h"

#if defined(__x86_64__)
#include <nmmintrin.h>

#if defined(__clang__) && __clang_major__ >= 14 /* there the instruction has a name of its own */
#define GC_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define GC_CRC_TARGET __attribute__((target("sse4.2")))
#endif
#define GC_CRC_WORD(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define GC_CRC_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
#define GC_CRC_NAME GC_CRC_TARGET uint32_t gc_crc32c_avx2
#include "crc32c_stretches.h"
#endif
