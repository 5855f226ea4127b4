/* avx2.h - the kernels of the avx2 tier. */
#ifndef GC_X86_AVX2_H
#define GC_X86_AVX2_H

#endif
