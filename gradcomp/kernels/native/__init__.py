"""The kernel set of the CPU and the compiled library that it calls."""

from gradcomp.kernels.native.kernels import NativeKernels
from gradcomp.kernels.native.library import ffi, lib, select_tier, tier, tiers
from gradcomp.kernels.native.threads import thread_count

__all__ = ["NativeKernels", "ffi", "lib", "select_tier", "thread_count", "tier", "tiers"]
