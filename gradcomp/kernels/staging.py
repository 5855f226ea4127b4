"""Values on an accelerator: they are exchanged as copies in host memory.

Copies run on a stream of their own, one a device. Events order them behind what the caller has
queued, and what the caller queues later behind them: nobody but the thread that encodes waits on
the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@functools.cache
def stream_of(device: torch.device) -> Any:
    """Return the stream of copies from and to a device; None for one without streams."""
    try:
        return torch.Stream(device)
    except (NotImplementedError, RuntimeError):  # MPS has one stream
        return None


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Have torch queue work of this device behind its copies."""
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(device.index):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def join(device: torch.device) -> None:
    """Have what is queued from now on wait for the copies that were queued so far."""
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is not None:
        torch.accelerator.current_stream(device).wait_event(stream.record_event())


class Staged:
    """Host memory for values of a device.

    Args:
        like: ``(numel,)``, as all that will be copied.

    Attributes:
        host: the copy, page-locked where that can be had.
    """

    def __init__(self, like: Tensor) -> None:
        self._stream, self._arrived = stream_of(like.device), None
        try:
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
        except (NotImplementedError, RuntimeError):
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu")

    def fetch(self, values: Tensor) -> None:
        """Begin to copy values as they are when all that is queued before this is done."""
        if self._stream is None:
            self.host.copy_(values)
            return
        self._stream.wait_event(torch.accelerator.current_stream(values.device).record_event())
        self._copy(self.host, values, values)
        self._arrived = self._stream.record_event()

    def wait(self) -> None:
        """Wait on the host until `host` has what `fetch` copies."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def give(self, values: Tensor) -> None:
        """Begin to copy `host` to values. It may be changed after the next `fetch` and `wait`."""
        if self._stream is None:
            values.copy_(self.host)
            return
        self._copy(values, self.host, values)

    def _copy(self, to: Tensor, values: Tensor, on_device: Tensor) -> None:
        with on_stream(on_device.device):
            to.copy_(values, non_blocking=True)
        # its memory is not given to anybody else before the copy is made
        on_device.record_stream(self._stream)
