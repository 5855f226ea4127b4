"""The kernel set of the CPU: C kernels through cffi, as the functions of
`gradcomp.kernels.interface.Kernels`.

Kernels run without the GIL. A call over a segment table is shared out over at most
``torch.get_num_threads()`` threads; which thread does which row changes no bit of the result. No
thread is started before the first call that is worth sharing.
"""

from gradcomp.kernels.native.kernels import (
    are_finite,
    divide,
    encode,
    follow,
    multiply,
    rescale,
    rotate,
    scales,
    scratch,
    sum_decode,
    unbias,
)
from gradcomp.kernels.native.library import ffi, lib, select_tier, tier, tiers
from gradcomp.kernels.native.threads import thread_count
from gradcomp.kernels.native.updates import join, split, targets, update

__all__ = [
    "are_finite",
    "divide",
    "encode",
    "ffi",
    "follow",
    "join",
    "lib",
    "multiply",
    "rescale",
    "rotate",
    "scales",
    "scratch",
    "select_tier",
    "split",
    "sum_decode",
    "targets",
    "thread_count",
    "tier",
    "tiers",
    "unbias",
    "update",
]
