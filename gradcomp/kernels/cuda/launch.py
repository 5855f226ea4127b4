"""Launches of Triton programs on one device, and host memory for copies."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

NUMEL = 1024  # elements per program of an elementwise kernel
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
_interpreter = threading.Lock()  # Triton's interpreter runs one program at a time


class Launcher:
    """Launches programs on a device; "cpu" is Triton's interpreter (``TRITON_INTERPRET=1``)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _each(self, program: Any, numel: int, *given: Any, **constants: Any) -> None:
        """Launch an elementwise kernel, with one program per `NUMEL` values."""
        if numel:
            self._launch(program, -(-numel // NUMEL), given, numel, E=NUMEL, **constants)

    def _launch(
        self, program: Any, count: int, given: tuple[Any, ...], *more: Any, **constants: Any
    ) -> None:
        plain = [_plain(one) for one in (*given, *more)]
        with self._on_device():
            program[(count,)](*plain, **constants, **LAUNCH)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cpu":
            return _interpreter
        return torch.accelerator.device_index(self.device.index)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def pinned(nbytes: int) -> Tensor:
    """Return ``(nbytes,)`` uint8 host memory, page-locked if possible, for asynchronous copies."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError:  # no page-locked memory is left: copies are synchronous
        return torch.empty(nbytes, dtype=torch.uint8)


def host_copy(memory: Tensor) -> Tensor:
    """Copy memory of a device to host memory, wait for the copy, and return it."""
    if memory.device.type == "cpu":
        return memory
    here = pinned(memory.numel())
    here.copy_(memory, non_blocking=True)
    torch.accelerator.current_stream(memory.device).synchronize()
    return here
