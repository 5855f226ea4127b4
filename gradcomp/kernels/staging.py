"""Values on an accelerator: they are exchanged as copies in host memory.

Copies run on a stream of their own, one a device. Events order them behind what the caller has
queued, and what the caller queues later behind them: nobody but the thread that encodes waits on
the host.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor

_lock = threading.Lock()  # two threads may be the first to ask for a stream


def stream_of(device: torch.device) -> Any:
    """Return the stream of copies from and to a device; None for one without such streams."""
    with _lock:
        return _make_stream(device)


@functools.cache
def _make_stream(device: torch.device) -> Any:
    if device.type == "mps":  # "a new stream" is the only one there, and record_stream is missing
        return None
    try:
        return torch.Stream(device)
    except (NotImplementedError, RuntimeError):
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


def refuse_graphs(device: torch.device) -> None:
    """Raise UnsupportedTensor while a CUDA graph is recorded on the current stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedTensor(
            "a CUDA graph records no exchange, whose messages the host sends: record forward and"
            " backward of a model without DDP or fully_shard, and call GradientAverager's average()"
            " after each replay"
        )


def follow(device: torch.device) -> None:
    """Have copies that are queued from now on wait for what was queued so far."""
    refuse_graphs(device)
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is not None:
        stream.wait_event(torch.accelerator.current_stream(device).record_event())


def join(device: torch.device) -> None:
    """Have what is queued from now on wait for the copies that were queued so far."""
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is not None:
        torch.accelerator.current_stream(device).wait_event(stream.record_event())


class Staged:
    """Host memory for values of a device.

    Args:
        like: ``(numel,)``, of the dtype and device of all that will be copied, and as large as any.

    Attributes:
        host: the copy, page-locked where that can be had.
    """

    def __init__(self, like: Tensor) -> None:
        self._device, self._stream, self._arrived = like.device, stream_of(like.device), None
        try:
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
        except (NotImplementedError, RuntimeError):
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu")

    def fetch(self, values: Tensor) -> Tensor:
        """Begin to copy values as they are when all that is queued before this is done; return
        where to, in `host`.
        """
        here = self.host[: values.numel()]
        follow(self._device)
        self._copy(here, values, values)
        if self._stream is not None:
            self._arrived = self._stream.record_event()
        return here

    def wait(self) -> None:
        """Wait on the host until `host` has what `fetch` copies."""
        if self._arrived is not None:
            # of this thread, which would get a context on the first device otherwise
            with torch.accelerator.device_index(self._device.index):
                self._arrived.synchronize()

    def give(self, values: Tensor) -> None:
        """Begin to copy `host` to values. It may be changed after the next `fetch` and `wait`."""
        self._copy(values, self.host[: values.numel()], values)

    def _copy(self, to: Tensor, values: Tensor, on_device: Tensor) -> None:
        with on_stream(self._device):
            to.detach().copy_(values.detach(), non_blocking=self._stream is not None)
        if self._stream is not None:
            # the memory is not given to anybody else before the copy is made
            on_device.record_stream(self._stream)


class Shared:
    """`Staged` that those share who never need it at the same time: one of each dtype and device,
    as large as the largest.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, torch.device], Staged] = {}

    def like(self, values: Tensor) -> Staged:
        """Return what can copy such values."""
        kind = values.dtype, values.device
        found = self._made.get(kind)
        if found is None or found.host.numel() < values.numel():
            found = self._made[kind] = Staged(values)
        return found
