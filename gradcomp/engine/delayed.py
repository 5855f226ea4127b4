"""Delayed averages: the gradients of one backward pass are exchanged while the next is computed.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent" (double buffering).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.engine.buckets import Bucket
from gradcomp.engine.step import Engine, Step


@dataclass
class DelayedSeconds:
    """Time spent in delayed exchanges so far, in seconds.

    Attributes:
        exchanges: number of finished exchanges.
        exchange_s: time from the start of the first bucket to the end of the last.
        waited_s: time that callers were blocked.
        codec_s: time spent in codecs.
        copy_s: time to copy gradients to buckets and averages back.
    """

    exchanges: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    codec_s: float = 0.0
    copy_s: float = 0.0


class DelayedAverages:
    """A step that stays open from one call to the next, with double-buffered buckets.

    One set of buckets is exchanged while the other receives the next gradients.

    Args:
        engine: averages the buckets; no other step of it may begin while this one is open.
        buckets, spare: the two sets of buckets, of the same layout.

    Attributes:
        step: the step whose averages have not been returned yet, or None.
        seconds: time spent in all exchanges.
    """

    def __init__(self, engine: Engine, buckets: Sequence[Bucket], spare: Sequence[Bucket]) -> None:
        self._engine, self._buckets, self._spare = engine, buckets, spare
        self.step: Step | None = None
        self.seconds = DelayedSeconds()
        self._codec_s = 0.0  # the engine's codec seconds when the step began

    def average(self) -> bool:
        """Start averaging ``p.grad``, and replace it with the averages of the previous call, or
        with None if there are none.

        Returns:
            Whether ``p.grad`` now has averages.

        Raises:
            GradcompError: this call or an earlier one failed.
        """
        has_averages = self._finish()
        step = self._engine.begin()
        begun = time.perf_counter()
        for bucket in self._spare:
            bucket.load()
        for bucket in self._buckets:
            if has_averages:
                bucket.store()
            else:  # leave no local gradients for an optimizer step
                bucket.clear()
        self._buckets, self._spare = self._spare, self._buckets
        self.seconds.copy_s += time.perf_counter() - begun
        self.step, self._codec_s = step, self._engine.stats.codec_seconds
        for bucket in self._buckets:
            step.submit(bucket.flat, bucket.members)
        step.seal()
        return has_averages

    def flush(self) -> bool:
        """Wait for the exchange in progress and copy its averages to ``p.grad``; return whether
        there was one.

        Raises:
            GradcompError: as in `average`.
        """
        has_averages = self._finish()
        if has_averages:
            begun = time.perf_counter()
            for bucket in self._buckets:
                bucket.store()
            self.seconds.copy_s += time.perf_counter() - begun
        return has_averages

    def drop(self) -> None:
        """Discard the averages of the exchange in progress; wait for it unless the engine has
        failed. ``p.grad`` is unchanged.
        """
        step, self.step = self.step, None
        if step is not None and self._engine.error is None:
            step.finish()

    def _finish(self) -> bool:
        """Wait for the exchange in progress; return whether there was one."""
        step, begun = self.step, time.perf_counter()
        if step is None:
            return False
        try:
            step.finish()
        except Exception:
            self.step = None
            raise
        self.step = None
        seconds = self.seconds
        seconds.exchanges += 1
        if self._engine.comm.world_size > 1:
            seconds.waited_s += time.perf_counter() - begun
            seconds.exchange_s += step.ended - step.started
            # codec_seconds may be smaller than before if the statistics were reset
            seconds.codec_s += max(0.0, self._engine.stats.codec_seconds - self._codec_s)
        return True
