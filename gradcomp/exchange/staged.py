"""The exchange of a bucket on an accelerator: on a stream of its own, or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import Exchange, Steps
from gradcomp.kernels.staging import Staged, on_stream, refuse_graphs, stream_of


def for_device(exchange: Exchange, like: Tensor, encodes_on: torch.device) -> Exchange:
    """Return an exchange for buckets like `like`, made from an exchange on the device `encodes_on`.
    Work on an accelerator runs on its copy stream; `gradcomp.kernels.staging.join` waits for it.
    """
    if like.is_cpu:
        return exchange
    return DeviceExchange(exchange) if like.device == encodes_on else StagedExchange(exchange, like)


class _Wrapped(Exchange):
    """An exchange of a bucket on an accelerator, made from another."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def flagged(self) -> bool:
        return self._exchange.flagged

    def commit(self) -> None:
        self._exchange.commit()


class DeviceExchange(_Wrapped):
    """An exchange that averages a bucket on its own device, made from one on that device."""

    @property
    def averages(self) -> Averages | None:
        return self._exchange.averages

    @property
    def slices(self) -> tuple[Steps, ...]:
        slices = [[partial(self._run, step) for step in steps] for steps in self._exchange.slices]
        slices[0][0] = partial(_both, self._wait, slices[0][0])
        return tuple(map(tuple, slices))

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        refuse_graphs(buffer.device)
        self._device, self._ready = buffer.device, None
        if (stream := stream_of(buffer.device)) is not None:
            # the allocator must not reuse the memory before the average is written
            buffer.record_stream(stream)
            self._ready = torch.accelerator.current_stream(buffer.device).record_event()
        self._exchange.begin(buffer, step, bucket)

    def unpack(self) -> None:
        self._exchange.unpack()

    def _wait(self) -> None:
        """Wait on the host until the bucket is ready. A wait on the copy stream would delay other
        buckets' steps.
        """
        if self._ready is not None:
            with torch.accelerator.device_index(self._device.index):
                self._ready.synchronize()

    def _run(self, step: Callable[[], None]) -> None:
        with on_stream(self._device):
            step()


class StagedExchange(_Wrapped):
    """An exchange that averages a host copy of a bucket. The first step waits for the copy, the
    last one starts to copy averages back; `gradcomp.kernels.staging.join` waits for that.

    Args:
        exchange: exchange in host memory.
        like: a bucket on the accelerator, with the size and dtype of all others.
    """

    def __init__(self, exchange: Exchange, like: Tensor) -> None:
        super().__init__(exchange)
        self._staged = Staged(like)

    @property
    def slices(self) -> tuple[Steps, ...]:
        slices = [list(steps) for steps in self._exchange.slices]
        slices[0][0] = partial(_both, self._staged.wait, slices[0][0])
        give = partial(self._staged.give, self._bucket)
        slices[-1][-1] = partial(_both, slices[-1][-1], give)  # may be the same step as above
        return tuple(map(tuple, slices))

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        self._bucket = buffer
        self._exchange.begin(self._staged.fetch(buffer), step, bucket)


def _both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()
