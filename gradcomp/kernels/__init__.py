"""The only way to compiled code: tables that kernels walk, and a kernel set for each kind of
device.

An accelerator that has none takes part all the same: its values are copied to host memory, where
the CPU's set works on them (`gradcomp.kernels.staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.interface import NO_RESIDUALS, Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native import NativeKernels
from gradcomp.version import warn_about_torch

warn_about_torch(torch.__version__)

CPU = torch.device("cpu")
MakeKernels = Callable[[torch.device], Kernels]
_native = NativeKernels()
# how the set of a device is made, by the kind of device
_makers: dict[str, MakeKernels] = {"cpu": lambda _: _native}
_sets: dict[torch.device, Kernels] = {}

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
        UnsupportedTensor: a kind of device that has none.
    """
    found = _sets.get(device)
    if found is None:
        if device.type not in _makers:
            raise UnsupportedTensor(f"there are no kernels for {device}")
        found = _sets.setdefault(device, _makers[device.type](device))
    return found


def home(device: torch.device) -> torch.device:
    """Return where values of a device are encoded and averaged: there if it has a kernel set,
    else in host memory.
    """
    return device if device.type in _makers else CPU


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``(numel,)`` memory of a device, with anything in it."""
    if home(device) == device:
        return of(device).empty(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def check_device(device: torch.device, name: str, *, staged: bool = True) -> None:
    """Raise UnsupportedTensor, for a tensor called `name`, unless its device has a kernel set or,
    where that is enough (`staged`), is this machine's accelerator.
    """
    if device.type in _makers:
        return
    kinds = [kind.upper() for kind in _makers]
    if staged and (accelerator := torch.accelerator.current_accelerator()) is not None:
        if accelerator.type == device.type:
            return
        kinds.append(accelerator.type.upper())
    raise UnsupportedTensor(
        f"{name} is on {device}: not supported yet, gradcomp takes {' and '.join(kinds)} tensors"
    )


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return `home` of the first of some tensors, which are all on one device; the CPU for none."""
    return home(next((tensor.device for tensor in tensors), CPU))


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
