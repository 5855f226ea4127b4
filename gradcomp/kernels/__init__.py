"""The only way to compiled code: tables that kernels walk, and a kernel set for each kind of
device.

An accelerator that has none takes part all the same: its values are copied to host memory, where
the CPU's set works on them (`gradcomp.kernels.staging`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.interface import NO_RESIDUALS, Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native import NativeKernels
from gradcomp.version import warn_about_torch

warn_about_torch(torch.__version__)

logger = logging.getLogger("gradcomp")

CPU = torch.device("cpu")
# returns None for a device whose values are copied to host memory after all
MakeKernels = Callable[[torch.device], "Kernels | None"]
USES_CUDA = "GRADCOMP_CUDA_KERNELS"  # environment variable: 1 encodes on GPUs
_native = NativeKernels()


def _cuda(device: torch.device) -> Kernels | None:
    if os.environ.get(USES_CUDA) != "1":
        return None
    try:
        from gradcomp.kernels.cuda import checked
    except ImportError as error:
        logger.warning(
            "gradcomp: gradients on %s are copied to the host and encoded there, although %s=1: %s"
            " (pip install 'gradcomp[cuda]')",
            device,
            USES_CUDA,
            error,
        )
        return None
    return checked(device)


# how the set of a device is made, by the kind of device
_makers: dict[str, MakeKernels] = {"cpu": lambda _: _native, "cuda": _cuda}
_sets: dict[torch.device, Kernels | None] = {}
_lock = threading.RLock()  # two threads may be the first to ask

__all__ = [
    "CPU",
    "NO_RESIDUALS",
    "Code",
    "Kernels",
    "MakeKernels",
    "Payloads",
    "Residuals",
    "check_device",
    "device_of",
    "empty",
    "home",
    "install",
    "of",
]


def of(device: torch.device) -> Kernels:
    """Return the kernel set of a device.

    Raises:
        UnsupportedTensor: a device that has none.
    """
    found = _find(device)
    if found is None:
        raise UnsupportedTensor(f"there are no kernels for {device}")
    return found


def home(device: torch.device) -> torch.device:
    """Return where values of a device are encoded and averaged: there if it has a kernel set,
    else in host memory.
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
    """Return ``(numel,)`` memory of a device, with anything in it."""
    if home(device) == device:
        return of(device).empty(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def check_device(device: torch.device, name: str, *, staged: bool = True) -> None:
    """Raise UnsupportedTensor, for a tensor called `name`, unless its device has a kernel set or is
    this machine's accelerator; where host memory is not enough (`staged` False), unless it is the
    CPU.
    """
    if device.type == CPU.type or (staged and _find(device) is not None):
        return
    kinds = ["CPU"]
    if staged and (accelerator := torch.accelerator.current_accelerator()) is not None:
        if accelerator.type == device.type:
            return
        kinds.append(accelerator.type.upper())
    raise UnsupportedTensor(
        f"{name} is on {device}: not supported yet, gradcomp takes {' and '.join(kinds)} tensors"
    )


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return `home` of some tensors; the CPU where they have none or several."""
    homes = {home(tensor.device) for tensor in tensors}
    return homes.pop() if len(homes) == 1 else CPU


def install(kind: str, make: MakeKernels | None) -> MakeKernels | None:
    """Have `make` make the kernel sets of a kind of device, for whatever is built from now on;
    None: such devices have none.

    Returns:
        What made them before.
    """
    before = _makers.pop(kind, None)
    if make is not None:
        _makers[kind] = make
    for device in [device for device in _sets if device.type == kind]:
        del _sets[device]
    return before
