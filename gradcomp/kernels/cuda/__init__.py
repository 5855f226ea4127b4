"""Kernels for CUDA devices, written in Triton (``pip install 'gradcomp[cuda]'``)."""

from gradcomp.kernels.cuda.kernels import TritonKernels

__all__ = ["TritonKernels"]
