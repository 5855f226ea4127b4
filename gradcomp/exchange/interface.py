"""What averages buckets: the protocol that flat, lone and hierarchical exchanges implement, and
one bucket run through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gradcomp.exchange.averages import Averages


class Exchange(Protocol):
    """What averages one bucket layout, step after step: `begin`, the steps of every slice in order,
    then `commit` unless flagged.

    Then the average stands in the bucket, or it is in `averages` until the next `begin` or
    `unpack`.

    Attributes:
        timeout_s: longest wait for a peer, in seconds, in each stage.
    """

    timeout_s: float

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite; final after the last
        slice's last step.
        """

    @property
    def averages(self) -> Averages | None:
        """The averages, where they are kept packed; their memory is the exchange's until the
        next `begin`.
        """

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice of the bucket, as many for each. A step runs after the one
        before it of its slice, and after its like of the slice before; it waits for at most one
        collective and starts at most one, on a channel of its own.

        Raises (each of them): PeerLost, PeerMismatch, CorruptPayload.
        """

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket to average.

        Args:
            buffer: ``(numel,)`` of the exchange's dtype and device, contiguous, overwritten by the
                average (NaN if flagged).
            step: of training, for random numbers and headers.
            bucket: its number, for messages of errors.
        """

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""

    def commit(self) -> None:
        """Make residuals and states that this step wrote current. Not of a flagged bucket."""


def run_stages(exchange: Exchange, buffer: Tensor, step: int) -> None:
    """Average one bucket here and now, and commit its residuals if every value was finite."""
    exchange.begin(buffer, step, 0)
    slices = exchange.slices
    count = len(slices[0])
    # what a slice has started runs while the one behind it is encoded
    for wave in range(len(slices) + count - 1):
        for stage in range(count):
            if 0 <= wave - stage < len(slices):
                slices[wave - stage][stage]()
    if not exchange.flagged:
        exchange.commit()
