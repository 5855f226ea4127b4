"""Averages that are one call behind: the gradients of one backward travel while the next one is
computed.

References:
    Seide et al. 2014, "1-bit stochastic gradient descent" (double buffering).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gradcomp.engine.buckets import Bucket
from gradcomp.engine.step import Engine, Step


class DelayedAverages:
    """Two sets of buckets that take turns: one is exchanged, the other takes the next gradients.

    Args:
        engine: averages; nobody else may begin a step of it while an exchange is under way.
        buckets, spare: the two sets, of the same layout.

    Attributes:
        exchanges: finished so far.
        exchange_s: seconds from the first bucket's start to the last one's end, over all exchanges.
        waited_s: seconds that callers were blocked for it.
        codec_s: seconds in which codecs worked, over all exchanges.
        copy_s: seconds in copying gradients to buckets and averages back.
    """

    def __init__(self, engine: Engine, buckets: Sequence[Bucket], spare: Sequence[Bucket]) -> None:
        self._engine, self._buckets, self._spare = engine, buckets, spare
        self._step: Step | None = None
        self._started = self._done = 0.0
        self.exchanges = 0
        self.exchange_s = self.waited_s = self.codec_s = self.copy_s = 0.0
        self._worked = 0.0

    def counters(self) -> tuple[Any, ...]:
        """Return what it has counted."""
        return self.exchanges, self.exchange_s, self.waited_s, self.codec_s, self.copy_s

    def set_counters(self, counters: tuple[Any, ...]) -> None:
        """Go back to counters of before."""
        self.exchanges, self.exchange_s, self.waited_s, self.codec_s, self.copy_s = counters

    @property
    def pending(self) -> bool:
        """Whether an exchange is under way, or its averages have not been handed back."""
        return self._step is not None

    def average(self) -> bool:
        """Start averaging ``p.grad``; put the averages of the call before in its place, or None if
        there are none.

        Returns:
            whether ``p.grad`` holds averages.

        Raises:
            GradcompError: what went wrong, now or in an earlier call; every ``p.grad`` is NaN then.
        """
        handed = self._finish()
        try:
            step = self._engine.begin()
        except Exception:
            self._poison()
            raise
        begun = time.perf_counter()
        for bucket in self._spare:
            bucket.load()
        self._hand(handed)
        self._buckets, self._spare = self._spare, self._buckets
        self._started = self._done = time.perf_counter()
        self._worked = self._engine.stats.codec_seconds
        self.copy_s += self._started - begun
        self._step = step
        for bucket in self._buckets:
            step.submit(bucket.flat, bucket.members, self._note)
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
            self.copy_s += time.perf_counter() - begun
        return handed

    def drop(self) -> None:
        """Wait for the exchange under way and forget its averages; ``p.grad`` stays as it is."""
        if self._step is not None:
            step, self._step = self._step, None
            step.finish()

    def _finish(self) -> bool:
        """Wait for the exchange under way; return whether there was one."""
        if self._step is None:
            return False
        begun = time.perf_counter()
        try:
            self._step.finish()
        except Exception:
            self._step = None
            self._poison()
            raise
        if self._engine.comm.world_size > 1:
            self.waited_s += time.perf_counter() - begun
            self.exchange_s += self._done - self._started
            # unless it was reset
            self.codec_s += max(0.0, self._engine.stats.codec_seconds - self._worked)
        self._step = None
        self.exchanges += 1
        return True

    def _hand(self, handed: bool) -> None:
        """Write the finished averages to ``p.grad``; without any, leave no local gradients that
        a step could take.
        """
        for bucket in self._buckets:
            if handed:
                bucket.store()
            else:
                bucket.clear()

    def _poison(self) -> None:
        """Leave no local gradient that could be taken for an average."""
        for bucket in self._buckets:
            bucket.flat.fill_(float("nan"))
            bucket.store()

    def _note(self) -> None:
        self._done = time.perf_counter()
