"""Access to compiled code: the tables that kernels iterate over, and a kernel set per device type.

Values on an accelerator without a kernel set are copied to host memory, and the CPU's kernel set
works on the copies (`gradcomp.kernels.staging`).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.interface import (
    NO_RESIDUALS,
    Code,
    Kernels,
    Payloads,
    Residuals,
    WeightKernels,
)
from gradcomp.kernels.native import NativeKernels
from gradcomp.kernels.weights import TorchWeights
from gradcomp.version import warn_about_torch

warn_about_torch(torch.__version__)

CPU = torch.device("cpu")
# returns None for a device whose values are to be copied to host memory
MakeKernels = Callable[[torch.device], "Kernels | None"]
USES_CUDA = "GRADCOMP_CUDA_KERNELS"  # environment variable: 1 encodes on GPUs
MIN_TRITON = 3, 9  # the kernels' bits were compared with this release, subnormals included
_native = NativeKernels()


def _cuda(device: torch.device) -> Kernels | None:
    if os.environ.get(USES_CUDA) != "1":
        return None
    from gradcomp.kernels.check import checked, refuse

    try:
        triton_version()
        from gradcomp.kernels.cuda import TritonKernels
    except ImportError as error:
        refuse(device, f"{error} (pip install 'gradcomp[cuda]')")
        return None
    return checked(device, TritonKernels)


def triton_version() -> str:
    """Return the version of Triton, or raise ImportError if it is missing or older than
    MIN_TRITON.
    """
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("Triton is not installed") from None
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < MIN_TRITON:
        needed = ".".join(map(str, MIN_TRITON))
        raise ImportError(f"Triton {found} is too old, {needed} is needed")
    return found


# factories of kernel sets, by device type
_makers: dict[str, MakeKernels] = {"cpu": lambda _: _native, "cuda": _cuda}
_sets: dict[torch.device, Kernels | None] = {}
_lock = threading.RLock()  # several threads may request the first kernel set

__all__ = [
    "CPU",
    "NO_RESIDUALS",
    "Code",
    "Kernels",
    "MakeKernels",
    "Payloads",
    "Residuals",
    "WeightKernels",
    "check_device",
    "device_of",
    "empty",
    "encoding_device",
    "install",
    "of",
    "of_weights",
    "triton_version",
]


def of(device: torch.device) -> Kernels:
    """Return the kernel set of a device.

    Raises:
        UnsupportedTensor: the device has no kernel set.
    """
    kernels = _find(device)
    if kernels is None:
        raise UnsupportedTensor(f"there are no kernels for {device}")
    return kernels


def of_weights(device: torch.device) -> WeightKernels:
    """Return what splits, joins and updates weights of a device: its kernel set, or torch
    operations if it has none.
    """
    return _find(device) or TorchWeights(device)


def encoding_device(device: torch.device) -> torch.device:
    """Return the device on which values of `device` are encoded and averaged: `device` itself if it
    has a kernel set, else the CPU.
    """
    return CPU if _find(device) is None else device


def _find(device: torch.device) -> Kernels | None:
    if device not in _sets:
        with _lock:
            if device not in _sets:
                make = _makers.get(device.type)
                _sets[device] = None if make is None else make(device)
    return _sets[device]


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized ``(numel,)`` tensor on a device."""
    if encoding_device(device) == device:
        return of(device).empty(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def check_device(device: torch.device, name: str) -> None:
    """Raise UnsupportedTensor if the device of tensor `name` is not supported: the CPU, devices
    with a kernel set, and this machine's accelerator are.
    """
    if device.type == CPU.type or _find(device) is not None:
        return
    kinds = ["CPU"]
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        if accelerator.type == device.type:
            return
        kinds.append(accelerator.type.upper())
    raise UnsupportedTensor(
        f"{name} is on {device}: not supported yet, gradcomp takes {' and '.join(kinds)} tensors"
    )


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the common `encoding_device` of some tensors; the CPU if there is not exactly one."""
    devices = {encoding_device(tensor.device) for tensor in tensors}
    return devices.pop() if len(devices) == 1 else CPU


def install(kind: str, make: MakeKernels | None) -> MakeKernels | None:
    """Register a factory of kernel sets for a device type; objects that exist keep their sets.

    Args:
        kind: device type, e.g. "cuda".
        make: the factory; None: devices of this type have no kernel set.

    Returns:
        The previous factory, or None.
    """
    before = _makers.pop(kind, None)
    if make is not None:
        _makers[kind] = make
    for device in [device for device in _sets if device.type == kind]:
        del _sets[device]
    return before
