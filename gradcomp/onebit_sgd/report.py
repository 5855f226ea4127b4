"""Reports of double buffering: seconds spent and hidden, and whether it makes training faster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapReport:
    """Seconds of one rank's training with a `DoubleBuffer`, summed since its creation. They do not
    show the time that double buffering saves; `DoubleBuffer.compare` measures it.

    Attributes:
        whole_steps: whether whole minibatches are exchanged instead of halves.
        minibatches, exchanges: number of minibatches, and of finished exchanges.
        exchange_s: seconds from an exchange's first bucket to its last.
        waited_s: the part of `exchange_s` in which this rank was blocked.
        codec_s: the part of `exchange_s` in which codecs encoded and decoded.
        update_s: seconds in ``optimizer.step()`` and in copying gradients to and from buckets.
        compute_s: seconds in forward and backward passes.
    """

    whole_steps: bool
    minibatches: int
    exchanges: int
    exchange_s: float
    waited_s: float
    codec_s: float
    update_s: float
    compute_s: float

    @property
    def hidden(self) -> float:
        """The share of `exchange_s` overlapped with computation, 0 to 1; 0 without exchanges."""
        return max(0.0, 1.0 - self.waited_s / self.exchange_s) if self.exchange_s > 0 else 0.0

    def __str__(self) -> str:
        """Return one sentence."""
        if not self.exchange_s:
            return "nothing was exchanged"
        seconds = self.exchange_s
        duration = f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
        return (
            f"hidden {100 * self.hidden:.0f} % of {duration} in {self.exchanges} exchanges;"
            " compare() measures whether that pays"
        )


@dataclass(frozen=True)
class OverlapComparison:
    """Seconds per minibatch on the slowest rank; every rank has the same values.

    Attributes:
        plain_s: seconds without double buffering: forward, backward, exchange and update of the
            whole minibatch, one after the other.
        overlapped_s: seconds with double buffering, the last exchange included.
    """

    plain_s: float
    overlapped_s: float

    @property
    def pays(self) -> bool:
        """Whether a minibatch is faster with double buffering."""
        return self.overlapped_s < self.plain_s

    def __str__(self) -> str:
        """Return one sentence."""
        return (
            f"double buffering {'pays' if self.pays else 'does not pay'} here:"
            f" {1e3 * self.overlapped_s:.1f} ms a minibatch with it, {1e3 * self.plain_s:.1f} ms"
            " without"
        )
