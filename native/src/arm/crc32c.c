/* crc32c.c - CRC-32C by the instructions of the CRC extension, which is optional in ARMv8.0. */
#include "internal.h"

#if defined(GC_NEON)
#if defined(__clang__)
#define GC_CRC_TARGET __attribute__((target("crc")))
#else
#define GC_CRC_TARGET __attribute__((target("+crc")))
#endif
GC_CRC_TARGET static uint32_t after_word(uint32_t crc, uint64_t word)
{
    __asm__("crc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
GC_CRC_TARGET static uint32_t after_byte(uint32_t crc, uint8_t byte)
{
    __asm__("crc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
    return crc;
}
#define GC_CRC_WORD(crc, word) after_word(crc, word)
#define GC_CRC_BYTE(crc, byte) after_byte(crc, byte)
#define GC_CRC_NAME GC_CRC_TARGET static uint32_t crc32c_by_instruction
#include "crc32c_stretches.h"

uint32_t gc_crc32c_neon(uint32_t crc, const uint8_t *data, size_t data_nbytes)
{
    return gc_cpu_has_arm_crc32() ? crc32c_by_instruction(crc, data, data_nbytes)
                                  : gc_crc32c_portable(crc, data, data_nbytes);
}
#endif
