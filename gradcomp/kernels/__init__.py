"""The only way to compiled code: tables that kernels walk, and a kernel set for each kind of
device.
"""

from __future__ import annotations

import torch

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.interface import NO_RESIDUALS, Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native import NativeKernels

CPU = torch.device("cpu")
_CPU_KERNELS = NativeKernels()

__all__ = ["CPU", "NO_RESIDUALS", "Code", "Kernels", "Payloads", "Residuals", "of"]


def of(device: torch.device) -> Kernels:
    """Return the kernel set of a device.

    Raises:
        UnsupportedTensor: a kind of device that has none.
    """
    if device.type != "cpu":
        raise UnsupportedTensor(
            f"there are no kernels for {device}: not supported yet, gradcomp takes CPU tensors"
        )
    return _CPU_KERNELS
