"""Staging of values of an accelerator: they are exchanged as copies in host memory.

Copies run on a separate stream, one per device. Events order them after work that the caller has
queued, and before work that it queues later. So only the thread that encodes waits on the host.
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

_lock = threading.Lock()  # several threads may request the first stream


def stream_of(device: torch.device) -> Any:
    """Return the stream for copies from and to a device; None if the device has no such stream."""
    with _lock:
        return _make_stream(device)


@functools.cache
def _make_stream(device: torch.device) -> Any:
    if device.type == "mps":  # has only one stream, and no record_stream
        return None
    try:
        return torch.Stream(device)
    except (NotImplementedError, RuntimeError):
        return None


@contextlib.contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Make the device's copy stream the current stream inside a ``with`` block."""
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
    """Raise UnsupportedTensor if the current stream is capturing a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedTensor(
            "a CUDA graph records no exchange, whose messages the host sends: record forward and"
            " backward of a model without DDP or fully_shard, and call GradientAverager's average()"
            " after each replay"
        )


def follow(device: torch.device) -> None:
    """Make later copies wait for all work queued on the current stream so far.

    Raises:
        UnsupportedTensor: the current stream is capturing a CUDA graph.
    """
    refuse_graphs(device)
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is not None:
        stream.wait_event(torch.accelerator.current_stream(device).record_event())


def join(device: torch.device) -> None:
    """Make later work on the current stream wait for all copies queued so far."""
    stream = None if device.type == "cpu" else stream_of(device)
    if stream is not None:
        torch.accelerator.current_stream(device).wait_event(stream.record_event())


def wait_for(device: torch.device) -> None:
    """Wait on the host until all work queued on a device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Staged:
    """Host memory for copies of values of a device.

    Args:
        like: ``(numel,)`` tensor with the dtype and device of all values to copy, and at least as
            many elements.

    Attributes:
        host: ``(numel,)`` buffer on the CPU, page-locked if possible.
    """

    def __init__(self, like: Tensor) -> None:
        self._device, self._stream, self._arrived = like.device, stream_of(like.device), None
        try:
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
        except (NotImplementedError, RuntimeError):
            self.host = torch.empty(like.numel(), dtype=like.dtype, device="cpu")

    def fetch(self, values: Tensor) -> Tensor:
        """Start copying values to `host`, after all work queued so far; return a view of the copy.
        It is valid after `wait`.
        """
        target = self.host[: values.numel()]
        follow(self._device)
        self._copy(target, values, values)
        if self._stream is not None:
            self._arrived = self._stream.record_event()
        return target

    def wait(self) -> None:
        """Block this thread until the copy of the last `fetch` has finished."""
        if self._arrived is not None:
            # without this, CUDA would create a context of this thread on the first device
            with torch.accelerator.device_index(self._device.index):
                self._arrived.synchronize()

    def give(self, values: Tensor) -> None:
        """Start copying `host` to values; `host` must not change until `fetch` and `wait`."""
        self._copy(values, self.host[: values.numel()], values)

    def _copy(self, to: Tensor, values: Tensor, on_device: Tensor) -> None:
        with on_stream(self._device):
            to.detach().copy_(values.detach(), non_blocking=self._stream is not None)
        if self._stream is not None:
            # keeps the allocator from reusing the memory before the copy has finished
            on_device.record_stream(self._stream)


class Shared:
    """Staging buffers for users that never need them at the same time: one per dtype and device, as
    large as the largest request.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Staged] = {}

    def like(self, values: Tensor) -> Staged:
        """Return a staging buffer for values of this dtype, device and size."""
        kind = values.dtype, values.device
        staged = self._buffers.get(kind)
        if staged is None or staged.host.numel() < values.numel():
            staged = self._buffers[kind] = Staged(values)
        return staged
