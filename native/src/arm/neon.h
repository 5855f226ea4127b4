/* neon.h - the kernels of the neon tier, for the dispatcher: those of little-endian aarch64, and
 * its CRC-32C instructions where the processor has them. */
#ifndef GC_ARM_NEON_H
#define GC_ARM_NEON_H

gc_encode_kernel gc_block_sums_neon, gc_ternary_encode_neon, gc_onebit_encode_neon,
    gc_block_encode_neon, gc_values_encode_neon;
gc_decode_kernel gc_ternary_decode_neon, gc_onebit_decode_neon, gc_block_decode_neon,
    gc_values_decode_neon;
void gc_sum_lanes_neon(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                       uint8_t *lanes);
gc_status gc_ternary_validate_neon(const uint8_t *codes, uint32_t numel);
uint32_t gc_crc32c_neon(uint32_t crc, const uint8_t *data, size_t data_nbytes);

#endif
