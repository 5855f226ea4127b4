"""Averages that are one call behind: the gradients of one backward travel while the next one is
computed.

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
    """What delayed exchanges have cost so far.

    Attributes:
        exchanges: finished.
        exchange_s: seconds from the first bucket's start to the last one's end.
        waited_s: seconds that callers were blocked for it.
        codec_s: seconds in which codecs worked.
        copy_s: seconds in copying gradients to buckets and averages back.
    """

    exchanges: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    codec_s: float = 0.0
    copy_s: float = 0.0


class DelayedAverages:
    """A step that stays open from one call to the next, and two sets of buckets that take turns:
    one is exchanged, the other takes the next gradients.

    Args:
        engine: averages; nobody else may begin a step of it while this one is open.
        buckets, spare: the two sets, of the same layout.

    Attributes:
        step: the exchange under way, or whose averages have not been handed back.
        seconds: over all exchanges.
    """

    def __init__(self, engine: Engine, buckets: Sequence[Bucket], spare: Sequence[Bucket]) -> None:
        self._engine, self._buckets, self._spare = engine, buckets, spare
        self.step: Step | None = None
        self.seconds = DelayedSeconds()
        self._codec_s = 0.0  # of the engine when the step began

    def average(self) -> bool:
        """Start averaging ``p.grad``; put the averages of the call before in its place, or None if
        there are none.

        Returns:
            whether ``p.grad`` holds averages.

        Raises:
            GradcompError: what went wrong, now or in an earlier call.
        """
        handed = self._finish()
        step = self._engine.begin()
        begun = time.perf_counter()
        for bucket in self._spare:
            bucket.load()
        for bucket in self._buckets:
            if handed:
                bucket.store()
            else:  # no local gradients that an optimizer could take
                bucket.clear()
        self._buckets, self._spare = self._spare, self._buckets
        self.seconds.copy_s += time.perf_counter() - begun
        self.step, self._codec_s = step, self._engine.stats.codec_seconds
        for bucket in self._buckets:
            step.submit(bucket.flat, bucket.members)
        step.seal()
        return handed

    def flush(self) -> bool:
        """Wait for the exchange under way and put its averages into ``p.grad``; return whether
        there was one.

        Raises:
            GradcompError: as `average`.
        """
        handed = self._finish()
        if handed:
            begun = time.perf_counter()
            for bucket in self._buckets:
                bucket.store()
            self.seconds.copy_s += time.perf_counter() - begun
        return handed

    def drop(self) -> None:
        """Wait for the exchange under way and forget its averages; ``p.grad`` stays as it is."""
        step, self.step = self.step, None
        if step is not None:
            step.finish()

    def _finish(self) -> bool:
        """Wait for the exchange under way; return whether there was one."""
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
            # unless it was reset
            seconds.codec_s += max(0.0, self._engine.stats.codec_seconds - self._codec_s)
        return True
