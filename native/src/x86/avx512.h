/* avx512.h - the kernels of the avx512 tier that differ from the avx2 tier's, for the dispatcher.
 * Needs what avx2 needs and avx512f, avx512bw, avx512dq, avx512vl, bmi2. */
#ifndef GC_X86_AVX512_H
#define GC_X86_AVX512_H

gc_encode_kernel gc_ternary_encode_avx512, gc_onebit_encode_avx512, gc_block_encode_avx512,
    gc_entropy_encode_avx512;

#endif
