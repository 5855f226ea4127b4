/* crc32c.c - CRC-32C (Castagnoli 1993), eight bytes a step by eight tables (Kounavis and Berry
 * 2005). */
#include "crc32c_table.h"
#include "numeric.h"

uint32_t gc_crc32c_portable(uint32_t crc, const uint8_t *data, size_t data_nbytes)
{
    const uint32_t (*table)[256] = gc_crc32c_table;
    crc = ~crc;
    for (; data_nbytes >= 8; data += 8, data_nbytes -= 8) {
        uint32_t low = gc_load_u32(data) ^ crc, high = gc_load_u32(data + 4);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^
              table[4][low >> 24] ^ table[3][high & 255] ^ table[2][high >> 8 & 255] ^
              table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; data_nbytes; data++, data_nbytes--)
        crc = crc >> 8 ^ table[0][(crc ^ *data) & 255];
    return ~crc;
}
