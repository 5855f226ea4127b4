"""The only door to the C kernels: pointers, lengths, status -> exception, and chunking over threads.

Pointers are plain integers (``tensor.data_ptr()``, ``array.ctypes.data``); the caller keeps the memory alive. Kernels run
without the GIL. A call over a segment table is shared out over at most ``torch.get_num_threads()`` threads; which thread
does which row changes no bit of the result. No thread is started before the first call that is worth sharing.
"""

from gradcomp.kernels.native.kernels import (
    Payloads,
    bytes_at,
    copy,
    copy_bytes,
    crc32c,
    lanes_validate,
    onebit_encode,
    onebit_validate,
    scales_are_finite,
    scales_validate,
    sum_decode,
    ternary_encode,
    ternary_scales,
    ternary_sum_lanes,
    ternary_validate,
    values_encode,
)
from gradcomp.kernels.native.library import DTYPES, TORCH_DTYPES, ffi, lib, select_tier, tier, tiers
from gradcomp.kernels.native.threads import thread_count
from gradcomp.kernels.native.updates import join, split, update

__all__ = [
    "DTYPES",
    "TORCH_DTYPES",
    "Payloads",
    "bytes_at",
    "copy",
    "copy_bytes",
    "crc32c",
    "ffi",
    "join",
    "lanes_validate",
    "lib",
    "onebit_encode",
    "onebit_validate",
    "scales_are_finite",
    "scales_validate",
    "select_tier",
    "split",
    "sum_decode",
    "ternary_encode",
    "ternary_scales",
    "ternary_sum_lanes",
    "ternary_validate",
    "thread_count",
    "tier",
    "tiers",
    "update",
    "values_encode",
]
