/* avx2.h - the kernels of the avx2 tier, for the dispatcher. Needs avx2, fma, f16c, sse4.2. */
#ifndef GC_X86_AVX2_H
#define GC_X86_AVX2_H

gc_encode_kernel gc_block_sums_avx2, gc_ternary_encode_avx2, gc_onebit_encode_avx2,
    gc_block_encode_avx2, gc_entropy_encode_avx2, gc_values_encode_avx2;
gc_decode_kernel gc_ternary_decode_avx2, gc_lanes_decode_avx2, gc_onebit_decode_avx2,
    gc_block_decode_avx2, gc_entropy_decode_avx2, gc_values_decode_avx2;
void gc_sum_lanes_avx2(const gc_decode_job *job, const gc_segment *in, const gc_segment *out,
                       uint8_t *lanes);
gc_status gc_ternary_validate_avx2(const uint8_t *codes, uint32_t numel);
gc_status gc_lanes_validate_avx2(const uint8_t *lanes, uint32_t numel, uint32_t world_size,
                                 unsigned lane_bits);
uint32_t gc_crc32c_avx2(uint32_t crc, const uint8_t *data, size_t data_nbytes);
gc_update_kernel gc_update_avx2;

#endif
