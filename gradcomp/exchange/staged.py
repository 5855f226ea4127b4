"""The exchange of a bucket on an accelerator: on a stream of its own, or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradcomp.exchange.averages import Averages
from gradcomp.exchange.routes import Exchange
from gradcomp.kernels.staging import Staged, on_stream, refuse_graphs, stream_of

Step = Callable[[], None]


def beside(exchange: Exchange, like: Tensor, encodes_on: torch.device) -> Exchange:
    """Return an exchange for buckets like `like`, made from an exchange on the device `encodes_on`.
    Work on an accelerator runs on its copy stream; `gradcomp.kernels.staging.join` waits for it.
    """
    if like.is_cpu:
        return exchange
    return DeviceExchange(exchange) if like.device == encodes_on else StagedExchange(exchange, like)


class DeviceExchange:
    """An exchange that averages a bucket on its own device.

    Args:
        exchange: exchange on that device.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def flagged(self) -> bool:
        """Whether a rank's bucket or the average is not finite."""
        return self._exchange.flagged

    @property
    def averages(self) -> Averages | None:
        """The averages if they are kept packed, otherwise None."""
        return self._exchange.averages

    @property
    def slices(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every slice."""
        slices = [[partial(self._run, step) for step in steps] for steps in self._exchange.slices]
        slices[0][0] = partial(_both, self._wait, slices[0][0])
        return tuple(map(tuple, slices))

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Set the bucket to average in this step; see `Exchange.begin`."""
        refuse_graphs(buffer.device)
        self._device, self._ready = buffer.device, None
        if (stream := stream_of(buffer.device)) is not None:
            # the allocator must not reuse the memory before the average is written
            buffer.record_stream(stream)
            self._ready = torch.accelerator.current_stream(buffer.device).record_event()
        self._exchange.begin(buffer, step, bucket)

    def unpack(self) -> None:
        """Decode packed averages into the bucket, if there are any, on the current stream."""
        self._exchange.unpack()

    def commit(self) -> None:
        """Commit the residuals and states of this step."""
        self._exchange.commit()

    def _wait(self) -> None:
        """Wait on the host until the bucket is ready. A wait on the copy stream would delay other
        buckets' steps.
        """
        if self._ready is not None:
            with torch.accelerator.device_index(self._device.index):
                self._ready.synchronize()

    def _run(self, step: Step) -> None:
        with on_stream(self._device):
            step()


class StagedExchange:
    """An exchange that averages a host copy of a bucket. The first step waits for the copy, the
    last one starts to copy averages back; `gradcomp.kernels.staging.join` waits for that.

    Args:
        exchange: exchange in host memory.
        like: a bucket on the accelerator, with the size and dtype of all others.
    """

    averages = None  # fused updates need averages on the device

    def __init__(self, exchange: Exchange, like: Tensor) -> None:
        self._exchange, self._staged = exchange, Staged(like)

    @property
    def flagged(self) -> bool:
        """Whether a rank's bucket or the average is not finite."""
        return self._exchange.flagged

    @property
    def slices(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every slice."""
        slices = [list(steps) for steps in self._exchange.slices]
        slices[0][0] = partial(_both, self._staged.wait, slices[0][0])
        give = partial(self._staged.give, self._bucket)
        slices[-1][-1] = partial(_both, slices[-1][-1], give)  # may be the same step as above
        return tuple(map(tuple, slices))

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Set the bucket to average in this step; see `Exchange.begin`."""
        self._bucket = buffer
        self._exchange.begin(self._staged.fetch(buffer), step, bucket)

    def unpack(self) -> None:
        """Do nothing: averages are never packed."""

    def commit(self) -> None:
        """Commit the residuals and states of this step."""
        self._exchange.commit()


def _both(one: Step, other: Step) -> None:
    one()
    other()
